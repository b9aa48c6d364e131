"""Frames that come late, are of nobody, or end a choice before its time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import structs
from tests.unit.gateway.support import DECODE, PREFILL, frame, spec
from tests.unit.gateway.test_request import LIMITS, Desk, of

from pagemesh.gateway.calls import events as ev
from pagemesh.wire.errors import Gone
from pagemesh.wire.messages import Refused
from pagemesh.wire.work_messages import Finish


@pytest.fixture
def desk() -> Iterator[Desk]:
    """Of a choice that has its first two tokens."""
    made = Desk(spec())
    made.start()
    made.arrive(frame(0, [5, 6]))
    yield made
    made.core.check()


@pytest.mark.parametrize("finish", ["error", "abort"])
def test_what_a_worker_gives_up_without_a_word_is_tried_again(desk: Desk, finish: Finish) -> None:
    out = desk.arrive(frame(2, [], finish=finish))
    assert {abort.message.reason for abort in of(out, ev.SendAbort)} == {"superseded"}
    (choose,) = of(desk.wait(LIMITS.backoff_ms_max), ev.ChooseRoute)
    assert choose.tokens.tolist()[8:] == [5, 6]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_end_before_what_is_there_already_is_no_end(desk: Desk, finish: Finish) -> None:
    desk.arrive(frame(0, [5], finish=finish))
    assert not desk.core.ended
    desk.arrive(frame(2, [7], finish=finish))
    assert (desk.tokens(), desk.ends()) == ([5, 6, 7], [ev.Ended(ev.Completed())])


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_end_that_repeats_what_is_there_already_is_one(desk: Desk, finish: Finish) -> None:
    desk.arrive(frame(1, [6], finish=finish))
    assert (desk.tokens(), desk.ends()) == ([5, 6], [ev.Ended(ev.Completed())])


def test_a_frame_of_a_choice_that_was_not_asked_for_is_not_looked_at(desk: Desk) -> None:
    assert desk.arrive(frame(0, [5], choice=1)) == []


def test_that_a_worker_knows_nothing_is_old_news_once_its_frames_come(desk: Desk) -> None:
    asked = of(desk.wait(LIMITS.silence_ms_max), ev.SendResend)
    assert {one.worker for one in asked} == {PREFILL, DECODE}
    desk.arrive(frame(2, [7]))
    gone = Refused.of(Gone("who?"))
    for one in asked:
        assert desk.feed(ev.ResendAnswered(one.message.key, one.worker, gone)) == []
    assert of(desk.wait(LIMITS.silence_ms_max - 1), ev.ChooseRoute) == []


def test_tokens_that_are_no_tokens_are_not_taken(desk: Desk) -> None:
    desk.arrive(structs.replace(frame(2, [7]), tokens=b"\x07\0\0\0\0"))
    assert desk.tokens() == [5, 6]
    assert of(desk.wait(LIMITS.backoff_ms_max), ev.ChooseRoute)


def test_a_choice_that_has_all_its_tokens_ends_though_its_last_frame_is_lost() -> None:
    desk = Desk(spec(max_tokens=2))
    desk.start()
    desk.arrive(frame(0, [5]))
    desk.arrive(frame(1, [6]))
    assert not desk.core.ended
    (ended,) = of(desk.feed(ev.WorkerLost(DECODE)), ev.ChoiceEnded)
    assert (ended.finish, ended.stop_reason) == ("length", None)
    assert desk.ends() == [ev.Ended(ev.Completed())]
