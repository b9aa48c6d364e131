"""Attempts that are over: what a worker still says of them, and what the next one inherits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.gateway.support import DECODE, PREFILL, ROUTE, frame, spec
from tests.unit.gateway.test_request import LIMITS, OTHER, OTHER_ROUTE, Desk, of

from pagemesh.gateway.calls import events as ev
from pagemesh.wire.errors import Gone
from pagemesh.wire.messages import Refused
from pagemesh.wire.work_messages import Frame


@pytest.fixture
def desk() -> Iterator[Desk]:
    """Choice 0 is in its second attempt, choice 1 has ended."""
    made = Desk(spec(choices=2))
    made.start()
    made.arrive(frame(0, [7], choice=1, finish="stop"))
    made.feed(ev.WorkerLost(PREFILL), ev.WorkerLost(DECODE))
    made.wait(100)
    made.place(OTHER_ROUTE)
    yield made
    made.core.check()


def told(desk: Desk, one: Frame) -> list[tuple[int, int | None]]:
    """Which attempts and choices ``one`` has their worker stop."""
    aborts = of(desk.arrive(one, DECODE), ev.SendAbort)
    assert all(abort.worker == DECODE for abort in aborts)
    return [(abort.message.attempt, abort.message.choice) for abort in aborts]


def test_a_worker_that_goes_on_with_an_older_attempt_is_told_to_stop_once_a_second(
    desk: Desk,
) -> None:
    found = []
    for position in range(9):
        found.append(told(desk, frame(position, [5])))
        desk.now_ms += 250
    one = [(1, 0)]
    assert found == [[], [], [], [], one, [], [], [], one]
    assert desk.tokens() == []


def test_a_worker_that_goes_on_with_an_ended_choice_is_told_to_stop_it(desk: Desk) -> None:
    assert told(desk, frame(1, [5], choice=1)) == []
    desk.now_ms += 1_000
    assert told(desk, frame(2, [5], choice=1)) == [(1, 1)]


def test_a_worker_that_goes_on_while_nobody_else_is_found_is_told_to_stop() -> None:
    desk = Desk(spec())
    desk.start()
    desk.feed(ev.WorkerLost(PREFILL), ev.WorkerLost(DECODE))
    assert told(desk, frame(0, [5])) == []
    desk.now_ms += 1_000
    assert told(desk, frame(1, [5])) == [(1, 0)]


def test_each_attempt_is_stopped_by_itself(desk: Desk) -> None:
    told(desk, frame(0, [5]))
    desk.feed(ev.WorkerLost(OTHER))
    desk.wait(100)
    desk.place(ROUTE)
    assert told(desk, frame(0, [5], attempt=2)) == []
    desk.now_ms += 1_000
    assert told(desk, frame(1, [5], attempt=2)) == [(2, 0)]
    assert told(desk, frame(1, [5])) == [(1, 0)]
    assert told(desk, frame(0, [5], attempt=3)) == []
    assert desk.tokens() == [5]


def test_a_last_word_and_frames_that_crossed_the_abort_have_nobody_told(desk: Desk) -> None:
    assert told(desk, frame(0, [5])) == []
    desk.now_ms += 999
    assert told(desk, frame(1, [5])) == []
    desk.now_ms += 1
    assert told(desk, frame(2, [5], finish="length")) == []


def test_a_late_answer_to_an_older_submit_says_nothing_about_the_newer() -> None:
    desk = Desk(spec())
    desk.feed(ev.Begin(), ev.Routed(ROUTE), ev.WorkerLost(PREFILL))
    desk.wait(100)
    desk.feed(ev.Routed(OTHER_ROUTE))
    late = Refused.of(Gone("this life is over"))
    assert desk.feed(ev.SubmitAnswered(1, PREFILL, late)) == []


def test_a_new_attempt_may_ask_for_its_own_lost_frames_as_often_as_the_first() -> None:
    desk = Desk(spec())
    desk.start()
    for attempt in (1, 2):
        asked = 0
        while of(desk.arrive(frame(3, [7], attempt=attempt)), ev.SendResend):
            asked += 1
            desk.now_ms += LIMITS.gap_patience_ms
        assert asked == LIMITS.resends_max
        assert of(desk.wait(LIMITS.backoff_ms_max), ev.ChooseRoute)
        desk.place()


def test_a_late_answer_about_an_older_attempt_says_nothing_about_the_newer() -> None:
    desk = Desk(spec())
    desk.start()
    (older, *_) = of(desk.wait(LIMITS.silence_ms_max), ev.SendResend)
    desk.feed(ev.WorkerLost(PREFILL))
    assert of(desk.wait(100), ev.ChooseRoute)
    desk.place()
    asked = of(desk.wait(LIMITS.silence_ms_max), ev.SendResend)
    assert {one.message.key.attempt for one in asked} == {2}
    gone = Refused.of(Gone("this attempt is over"))
    for one in asked:
        assert desk.feed(ev.ResendAnswered(older.message.key, one.worker, gone)) == []
    for one in asked:
        desk.feed(ev.ResendAnswered(one.message.key, one.worker, gone))
    assert of(desk.wait(100), ev.ChooseRoute)
