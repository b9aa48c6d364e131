"""How an attempt that failed is made good: when it is tried again, by whom, and what still counts
of what came before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.unit.gateway.support import DECODE, PREFILL, ROUTE, frame, spec
from tests.unit.gateway.test_request import LIMITS, OTHER, OTHER_ROUTE, Desk, of

from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.choice import TextPiece
from pagemesh.gateway.calls.events import PagesFrom
from pagemesh.gateway.calls.spec import ATTEMPT_MAX
from pagemesh.wire.errors import Busy, Denied, Fault, Internal, NoCapacity, OverQuota
from pagemesh.wire.messages import Refused
from pagemesh.wire.presence import PageNeeds
from pagemesh.wire.tokens import U32, unpack


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk(spec())
    yield made
    made.core.check()


def moved(desk: Desk) -> ev.ChooseRoute:
    """What is looked for when nobody has it any more."""
    desk.feed(ev.WorkerLost(PREFILL), ev.WorkerLost(DECODE), ev.WorkerLost(OTHER))
    (choose,) = of(desk.wait(LIMITS.backoff_ms_max), ev.ChooseRoute)
    return choose


@pytest.mark.parametrize(("asked_ms", "waited_ms"), [(0, 10), (700, 700), (60_000, 1_000)])
def test_a_worker_that_says_when_to_come_back_is_left_alone_until_then_or_for_a_second(
    desk: Desk, asked_ms: int, waited_ms: int
) -> None:
    desk.feed(ev.Begin(), ev.Routed(ROUTE))
    busy = Refused.of(Busy("full", retry_after_ms=asked_ms))
    desk.feed(ev.SubmitAnswered(1, PREFILL, busy))
    assert desk.core.due_ms == waited_ms


@pytest.mark.parametrize("after_ms", [0, 5])
@pytest.mark.parametrize("fault", [NoCapacity, OverQuota, Denied])
def test_a_refusal_is_for_good_unless_it_says_when_to_come_back(
    desk: Desk, fault: type[Fault], after_ms: int
) -> None:
    desk.feed(ev.Begin(), ev.Routed(ROUTE))
    refused = Refused.of(fault("no", retry_after_ms=after_ms))
    desk.feed(ev.SubmitAnswered(1, PREFILL, refused))
    assert desk.core.ended is (after_ms == 0)
    if after_ms:
        assert of(desk.wait(1_000), ev.ChooseRoute)


@pytest.mark.parametrize("after_ms", [0, 5])
def test_nobody_is_looked_for_again_where_none_will_ever_do(desk: Desk, after_ms: int) -> None:
    desk.feed(ev.Begin(), ev.Unroutable(NoCapacity("too long", retry_after_ms=after_ms)))
    assert desk.core.ended is (after_ms == 0)


def test_the_pause_before_each_further_attempt_is_twice_as_long(desk: Desk) -> None:
    desk.feed(ev.Begin(), ev.Routed(ROUTE))
    pauses = []
    for attempt in range(1, LIMITS.failures_max + 1):
        desk.feed(ev.SubmitAnswered(attempt, PREFILL, Refused.of(Busy("full"))))
        pauses.append(desk.core.due_ms - desk.now_ms)
        desk.wait(pauses[-1])
        desk.feed(ev.Routed(ROUTE))
    assert pauses == [10, 20, 40]


def test_who_failed_is_not_avoided_any_more_once_there_was_nobody_else(desk: Desk) -> None:
    desk.start()
    desk.arrive(frame(0, [5]))
    assert moved(desk).avoid == {DECODE}
    desk.feed(ev.Unroutable(Busy("nobody", retry_after_ms=1_000)))
    (choose,) = of(desk.wait(1_000), ev.ChooseRoute)
    assert choose.avoid == frozenset()


def test_who_failed_before_the_last_token_is_not_avoided_any_more(desk: Desk) -> None:
    desk.start()
    desk.arrive(frame(0, [5]))
    moved(desk)
    desk.place(OTHER_ROUTE)
    desk.arrive(frame(1, [6], attempt=2), OTHER)
    assert moved(desk).avoid == {OTHER}


def test_what_is_begun_again_needs_room_for_the_rest_alone(desk: Desk) -> None:
    desk.start()
    assert moved(desk).growth_tokens == 100
    desk.place()
    desk.arrive(frame(0, list(range(30)), attempt=2))
    choose = moved(desk)
    assert (len(choose.tokens), choose.growth_tokens) == (38, 70)


def test_a_route_is_chosen_for_the_longest_of_the_choices_that_are_begun_again() -> None:
    desk = Desk(spec(choices=2))
    desk.start()
    desk.arrive(frame(0, [5], choice=0))
    desk.arrive(frame(0, [6, 7], choice=1))
    desk.feed(ev.WorkerLost(DECODE))
    (choose,) = of(desk.wait(100), ev.ChooseRoute)
    assert choose.tokens.tolist()[8:] == [6, 7]


def test_no_attempt_has_a_number_that_the_wire_cannot_carry() -> None:
    desk = Desk(spec(max_tokens=2 * ATTEMPT_MAX, deadline_ms=10**9))
    desk.start()
    for attempt in range(1, ATTEMPT_MAX):
        desk.arrive(frame(attempt - 1, [5], attempt=attempt), PREFILL)
        desk.feed(ev.WorkerLost(PREFILL))
        desk.wait(100)
        desk.place()
    assert desk.core.attempt_count == ATTEMPT_MAX
    desk.feed(ev.WorkerLost(PREFILL))
    desk.wait(100)
    desk.feed(ev.Routed(ROUTE))
    (ended,) = desk.ends()
    assert isinstance(ended.outcome, ev.Failed) and isinstance(ended.outcome.fault, Internal)


def test_gaps_that_were_filled_do_not_add_up(desk: Desk) -> None:
    desk.start()
    for position in range(2 * LIMITS.resends_max):
        assert of(desk.arrive(frame(position + 1, [9])), ev.SendResend)
        desk.arrive(frame(position, [5]))
    assert desk.tokens() == [5] * 2 * LIMITS.resends_max


def test_a_loss_just_after_frames_were_asked_for_is_asked_about_when_their_time_is_up(
    desk: Desk,
) -> None:
    desk.start()
    desk.arrive(frame(0, [5]))
    assert of(desk.arrive(frame(2, [7])), ev.SendResend)
    desk.wait(100)
    assert desk.feed(ev.FramesMissed(DECODE)) == []
    assert of(desk.wait(LIMITS.gap_patience_ms - 100), ev.SendResend)


def test_each_search_for_a_worker_has_all_of_its_time(desk: Desk) -> None:
    desk.feed(ev.Begin(), ev.Unroutable(Busy("nobody", retry_after_ms=1_000)))
    desk.wait(1_000)
    desk.place()
    desk.now_ms = LIMITS.recovery_wait_ms_max + 5_000
    moved(desk)
    desk.feed(ev.Unroutable(Busy("nobody", retry_after_ms=1_000)))
    assert not desk.core.ended


def test_a_request_that_had_a_worker_waits_for_one_as_long_as_for_a_recovery(desk: Desk) -> None:
    desk.start()
    desk.feed(ev.WorkerLost(PREFILL))
    since_ms = desk.now_ms
    while desk.now_ms - since_ms < LIMITS.recovery_wait_ms_max:
        assert not desk.core.ended
        assert of(desk.wait(1_000), ev.ChooseRoute)
        desk.feed(ev.Unroutable(Busy("nobody", retry_after_ms=1_000)))


def test_a_submit_is_not_waited_for_beyond_the_deadline(desk: Desk) -> None:
    desk.now_ms = 59_000
    (submit,) = of(desk.feed(ev.Begin(), ev.Routed(ROUTE)), ev.SendSubmit)
    assert submit.timeout_ms == 1_000


def test_a_submit_that_may_still_be_answered_is_not_asked_about(desk: Desk) -> None:
    desk.feed(ev.Begin(), ev.Routed(ROUTE))
    assert of(desk.wait(LIMITS.submit_timeout_ms), ev.SendResend) == []
    assert of(desk.wait(LIMITS.silence_ms_max), ev.SendResend)


def test_a_worker_that_is_lost_is_not_asked_what_it_handed_over(desk: Desk) -> None:
    desk.start()
    desk.arrive(frame(0, [5]), PREFILL)
    asked = of(desk.feed(ev.WorkerLost(DECODE)), ev.SendResend)
    assert [one.worker for one in asked] == [PREFILL]


def test_what_a_later_attempt_found_in_the_cache_is_not_told_as_the_clients(desk: Desk) -> None:
    desk.start()
    desk.arrive(frame(0, [5], cached=4))
    moved(desk)
    desk.place(OTHER_ROUTE)
    desk.arrive(frame(1, [6], attempt=2, cached=8), OTHER)
    assert desk.core.usage.cached_tokens == 4


def test_no_more_of_a_prompt_is_told_as_cached_than_it_has(desk: Desk) -> None:
    """The first frame that says it may be of an attempt that began with tokens of the answer."""
    desk.start()
    desk.arrive(frame(0, [5, 6, 7]))
    moved(desk)
    desk.place(OTHER_ROUTE)
    desk.arrive(frame(3, [8], attempt=2, cached=10), OTHER)
    assert desk.core.usage.cached_tokens == 8


def test_what_was_cached_elsewhere_is_counted_of_the_first_route_alone(desk: Desk) -> None:
    desk.start(replace(ROUTE, elsewhere_tokens=7))
    moved(desk)
    desk.place(replace(OTHER_ROUTE, elsewhere_tokens=9))
    assert desk.core.elsewhere_tokens == 7


# Pages that are asked for beside a submit ---------------------------------------------------

BESIDE = replace(ROUTE, pages=PagesFrom("a", 3, PageNeeds(growth_tokens=200, first_tokens=64)))


def test_pages_asked_for_beside_a_submit_are_those_that_its_worker_would_ask_for(
    desk: Desk,
) -> None:
    (submit,) = of(desk.start(BESIDE), ev.SendSubmit)
    assert submit.pages is not None
    admit = submit.pages.message
    assert unpack(admit.tokens).tolist() == list(range(1, 9))
    assert admit.tokens_max == admit.reserve_tokens == 8 + 99, "the last token needs no slot"
    moved(desk)
    (again,) = of(desk.place(BESIDE), ev.SendSubmit)
    assert again.pages is None, "it may begin with tokens of the answer, or be there already"


@pytest.mark.parametrize("wish", [{"read_cache": False}, {"prompt_logprobs": True}])
def test_a_prompt_that_is_to_be_computed_has_no_cached_pages_asked_for(
    wish: dict[str, bool],
) -> None:
    desk = Desk(replace(spec(), **wish))  # type: ignore[arg-type]
    (submit,) = of(desk.start(BESIDE), ev.SendSubmit)
    assert submit.pages is None


# Stop strings -------------------------------------------------------------------------------


class StopsAtOnce:
    """Text whose first token completes a stop string."""

    def push(self, tokens: U32) -> TextPiece:
        return TextPiece("", 1, "END")

    def close(self) -> str:
        return ""


@pytest.fixture
def stopping() -> Desk:
    made = Desk(spec(stop_tokens=(3,)))
    made.core.choices[0].text = StopsAtOnce()
    made.start()
    return made


def test_a_stop_string_has_the_workers_stop(stopping: Desk) -> None:
    out = stopping.arrive(frame(0, [5, 6]))
    aborts = of(out, ev.SendAbort)
    assert {(one.worker, one.message.reason) for one in aborts} == {
        (PREFILL, "stop"),
        (DECODE, "stop"),
    }
    (ended,) = of(out, ev.ChoiceEnded)
    assert (ended.finish, ended.stop_reason) == ("stop", "END")
    assert stopping.core.usage.completion_tokens == 1


def test_a_stop_string_before_a_stop_token_leaves_no_token_out_of_the_text(stopping: Desk) -> None:
    out = stopping.arrive(frame(0, [5, 6, 3], finish="stop", stop_token=3))
    (delivered,) = of(out, ev.Deliver)
    assert (delivered.tokens.tolist(), delivered.hidden_count) == ([5], 0)
    assert of(out, ev.SendAbort) == [], "it has ended there too"
