"""The life of one request: placing, delivering, mending, ending."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
from msgspec import structs
from tests.unit.gateway.support import DECODE, PREFILL, REQUEST, ROUTE, frame, spec

from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.choice import TokensOnly
from pagemesh.gateway.calls.events import Route, Worker
from pagemesh.gateway.calls.request import RequestCore
from pagemesh.gateway.calls.spec import RequestLimits, RequestSpec
from pagemesh.wire.errors import Busy, DeadlineExceeded, Gone, NoCapacity
from pagemesh.wire.messages import Ok, Refused, SequenceKey
from pagemesh.wire.tokens import pack, unpack
from pagemesh.wire.work_messages import Accepted, Failure, Frame, TopLogprobs

C = TypeVar("C")
LIMITS = RequestLimits(failures_max=3, backoff_ms=10, silence_ms_max=1_000)
OTHER = Worker("prefill-2", 12)
OTHER_ROUTE = Route(OTHER, None, ROUTE.model_root, ROUTE.root, 0)


class Desk:
    """A core with its clock, and the commands it gave, sorted."""

    def __init__(self, given: RequestSpec, limits: RequestLimits = LIMITS) -> None:
        self.now_ms = 0
        texts = [TokensOnly() for _ in range(given.choice_count)]
        self.core = RequestCore(given, limits, texts, self.now_ms)
        self.commands: list[ev.Command] = []

    def feed(self, *events: ev.Event) -> list[ev.Command]:
        """Returns what these events caused."""
        out: list[ev.Command] = []
        for event in events:
            out += self.core.handle(event, self.now_ms)
            self.core.check()
        self.commands += out
        return out

    def wait(self, duration_ms: int) -> list[ev.Command]:
        """Let time pass, ticking whenever the core wants it."""
        until = self.now_ms + duration_ms
        out: list[ev.Command] = []
        while not self.core.ended and self.core.due_ms <= until:
            self.now_ms = max(self.now_ms, self.core.due_ms)
            out += self.feed(ev.Tick())
            if any(isinstance(command, ev.ChooseRoute) for command in out):
                break
        else:
            self.now_ms = until
        return out

    def start(self, route: Route = ROUTE) -> list[ev.Command]:
        """Up to an accepted submit."""
        self.feed(ev.Begin())
        return self.place(route)

    def place(self, route: Route = ROUTE) -> list[ev.Command]:
        out = self.feed(ev.Routed(route))
        submit = next(c for c in out if isinstance(c, ev.SendSubmit))
        worker = route.worker
        accepted = Accepted(worker=worker.name, incarnation=worker.incarnation)
        return out + self.feed(ev.SubmitAnswered(submit.message.attempt, worker, accepted))

    def arrive(self, one: Frame, worker: Worker = DECODE) -> list[ev.Command]:
        return self.feed(ev.FrameArrived(worker, one))

    def tokens(self, choice: int = 0) -> list[int]:
        """Everything delivered to the client."""
        found: list[int] = []
        for command in self.commands:
            if isinstance(command, ev.Deliver) and command.choice == choice:
                assert command.first_position == len(found)
                found += command.tokens.tolist()
        return found

    def ends(self) -> list[ev.Ended]:
        return [command for command in self.commands if isinstance(command, ev.Ended)]


def of(commands: list[ev.Command], kind: type[C]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk(spec())
    yield made
    made.core.check()


def test_a_request_is_submitted_with_its_prompt_and_the_time_that_is_left(desk: Desk) -> None:
    desk.now_ms = 1_000
    desk.feed(ev.Begin())
    (submit,) = of(desk.feed(ev.Routed(ROUTE)), ev.SendSubmit)
    assert submit.worker == PREFILL
    assert unpack(submit.message.prompt).tolist() == list(range(1, 9))
    assert submit.message.decode == DECODE.name
    assert submit.message.deadline_ms == 59_000
    assert submit.message.attempt == 1


def test_frames_are_delivered_once_and_the_finish_completes_the_request(desk: Desk) -> None:
    desk.start()
    desk.arrive(frame(0, [5], cached=4), PREFILL)
    desk.arrive(frame(1, [6, 7]))
    desk.arrive(frame(1, [6, 7]))
    desk.arrive(frame(2, [7, 8], finish="length"))
    assert desk.tokens() == [5, 6, 7, 8]
    assert desk.ends() == [ev.Ended(ev.Completed())]
    assert (desk.core.usage.completion_tokens, desk.core.usage.cached_tokens) == (4, 4)


def test_a_gap_is_asked_for_once_and_filled(desk: Desk) -> None:
    desk.start()
    desk.arrive(frame(0, [5]))
    (resend,) = of(desk.arrive(frame(2, [7])), ev.SendResend)
    assert (resend.worker, resend.message.position) == (DECODE, 1)
    assert of(desk.arrive(frame(3, [8])), ev.SendResend) == []
    desk.arrive(frame(1, [6, 7, 8]))
    assert desk.tokens() == [5, 6, 7, 8]


def test_a_finish_beyond_a_gap_does_not_end_the_choice(desk: Desk) -> None:
    desk.start()
    desk.arrive(frame(0, [5]))
    desk.arrive(frame(2, [7], finish="stop"))
    assert not desk.core.ended
    desk.arrive(frame(1, [6, 7], finish="stop"))
    assert desk.tokens() == [5, 6, 7]
    assert desk.core.ended


def test_a_lost_worker_is_replaced_with_the_tokens_delivered_so_far(desk: Desk) -> None:
    desk.start()
    desk.arrive(frame(0, [5]))
    lost = desk.feed(ev.WorkerLost(DECODE))
    (abort,) = of(lost, ev.SendAbort)
    assert (abort.worker, abort.message.reason) == (PREFILL, "superseded")
    (choose,) = of(desk.wait(100), ev.ChooseRoute)
    assert choose.tokens.tolist() == [*range(1, 9), 5]
    assert choose.avoid == frozenset({DECODE})
    assert choose.model_root == ROUTE.model_root
    (submit,) = of(desk.place(OTHER_ROUTE), ev.SendSubmit)
    assert submit.message.attempt == 2
    assert unpack(submit.message.choices[0].generated).tolist() == [5]
    desk.arrive(frame(1, [99], attempt=1))
    desk.arrive(frame(1, [6], attempt=2, finish="length"), OTHER)
    assert desk.tokens() == [5, 6]


def test_what_an_older_attempt_sends_is_not_looked_at(desk: Desk) -> None:
    desk.start()
    desk.feed(ev.WorkerLost(PREFILL))
    desk.wait(100)
    desk.place(OTHER_ROUTE)
    assert desk.arrive(frame(0, [1, 2, 3], attempt=1, finish="stop"), PREFILL) == []


@pytest.mark.parametrize("code", ["Stale", "Gone", "Internal", "Busy"])
def test_a_mendable_error_is_tried_again_and_in_the_end_told(desk: Desk, code: str) -> None:
    desk.start()
    for attempt in range(1, LIMITS.failures_max + 2):
        failure = Failure(code=code, message="broken")
        key = SequenceKey(request=REQUEST, attempt=attempt, choice=0)
        desk.arrive(Frame(key=key, first_position=0, finish="error", error=failure), PREFILL)
        if attempt <= LIMITS.failures_max:
            assert of(desk.wait(2_000), ev.ChooseRoute)
            desk.place()
    (ended,) = desk.ends()
    assert isinstance(ended.outcome, ev.Failed) and ended.outcome.fault.code == code


def test_progress_forgives_earlier_failures(desk: Desk) -> None:
    desk.start()
    for attempt in range(1, 4 * LIMITS.failures_max):
        desk.arrive(frame(attempt - 1, [attempt], attempt=attempt), PREFILL)
        desk.feed(ev.WorkerLost(PREFILL))
        assert of(desk.wait(100), ev.ChooseRoute)
        desk.place()
    assert desk.tokens() == list(range(1, 4 * LIMITS.failures_max))


def test_what_no_attempt_can_mend_ends_the_request_at_once(desk: Desk) -> None:
    desk.feed(ev.Begin(), ev.Routed(ROUTE))
    refused = Refused.of(NoCapacity("never"))
    desk.feed(ev.SubmitAnswered(1, PREFILL, refused))
    (ended,) = desk.ends()
    assert isinstance(ended.outcome, ev.Failed)
    assert isinstance(ended.outcome.fault, NoCapacity)


def test_nobody_to_take_it_is_waited_for_a_while_then_told(desk: Desk) -> None:
    desk.feed(ev.Begin())
    while not desk.core.ended:
        desk.feed(ev.Unroutable(Busy("nobody", retry_after_ms=1_000)))
        desk.wait(1_000)
        assert desk.now_ms < 10_000
    (ended,) = desk.ends()
    assert isinstance(ended.outcome, ev.Failed) and isinstance(ended.outcome.fault, Busy)
    assert desk.now_ms >= LIMITS.worker_wait_ms_max


def test_a_worker_on_its_way_back_is_waited_for_as_long_as_for_a_recovery(desk: Desk) -> None:
    desk.feed(ev.Begin())
    started_ms = desk.now_ms
    while desk.now_ms - started_ms < LIMITS.recovery_wait_ms_max:
        assert not desk.core.ended
        desk.feed(ev.Unroutable(Busy("nobody", retry_after_ms=1_000), expected=True))
        desk.wait(1_000)
    desk.feed(ev.Unroutable(Busy("nobody", retry_after_ms=1_000), expected=True))
    (ended,) = desk.ends()
    assert isinstance(ended.outcome, ev.Failed) and isinstance(ended.outcome.fault, Busy)


def test_a_worker_that_is_expected_no_more_is_not_waited_for_longer(desk: Desk) -> None:
    desk.feed(ev.Begin())
    while desk.now_ms < LIMITS.worker_wait_ms_max:
        desk.feed(ev.Unroutable(Busy("nobody", retry_after_ms=1_000), expected=True))
        desk.wait(1_000)
    desk.feed(ev.Unroutable(Busy("nobody", retry_after_ms=1_000), expected=False))
    assert desk.core.ended


def test_silence_is_looked_into_and_a_worker_that_knows_goes_on(desk: Desk) -> None:
    desk.start()
    asked = of(desk.wait(LIMITS.silence_ms_max), ev.SendResend)
    assert {command.worker for command in asked} == {PREFILL, DECODE}
    key = asked[0].message.key
    gone = Refused.of(Gone("handed over"))
    desk.feed(ev.ResendAnswered(key, PREFILL, gone), ev.ResendAnswered(key, DECODE, Ok()))
    desk.arrive(frame(0, [5], finish="length"))
    assert desk.tokens() == [5]


def test_silence_of_a_sequence_that_nobody_knows_is_tried_again(desk: Desk) -> None:
    desk.start()
    asked = of(desk.wait(LIMITS.silence_ms_max), ev.SendResend)
    gone = Refused.of(Gone("who?"))
    for command in asked:
        desk.feed(ev.ResendAnswered(command.message.key, command.worker, gone))
    assert of(desk.wait(100), ev.ChooseRoute)


def test_a_worker_too_busy_to_be_asked_keeps_its_sequence(desk: Desk) -> None:
    desk.start()
    busy = Refused.of(Busy("the inbox is full", retry_after_ms=50))
    for command in of(desk.wait(LIMITS.silence_ms_max), ev.SendResend):
        desk.feed(ev.ResendAnswered(command.message.key, command.worker, busy))
    assert of(desk.wait(100), ev.ChooseRoute) == []
    assert of(desk.wait(LIMITS.silence_ms_max), ev.SendResend)
    desk.arrive(frame(0, [5], finish="length"))
    assert desk.tokens() == [5]


def test_a_lost_message_has_every_sequence_of_that_worker_asked_for(desk: Desk) -> None:
    desk.start()
    desk.arrive(frame(0, [5]))
    (resend,) = of(desk.feed(ev.FramesMissed(DECODE)), ev.SendResend)
    assert (resend.worker, resend.message.position) == (DECODE, 1)
    assert desk.feed(ev.FramesMissed(OTHER)) == []


def test_a_client_that_leaves_stops_every_worker(desk: Desk) -> None:
    desk.start()
    desk.arrive(frame(0, [5]))
    out = desk.feed(ev.ClientGone())
    assert {(a.worker, a.message.reason) for a in of(out, ev.SendAbort)} == {
        (PREFILL, "client"),
        (DECODE, "client"),
    }
    assert desk.ends() == [ev.Ended(ev.Cancelled())]
    assert desk.arrive(frame(1, [6], finish="stop")) == []


def test_the_deadline_ends_everything(desk: Desk) -> None:
    desk.start()
    desk.now_ms = 60_000
    out = desk.feed(ev.Tick())
    assert {a.message.reason for a in of(out, ev.SendAbort)} == {"deadline"}
    (ended,) = desk.ends()
    assert isinstance(ended.outcome, ev.Failed)
    assert isinstance(ended.outcome.fault, DeadlineExceeded)


def test_choices_live_and_fail_by_themselves() -> None:
    desk = Desk(spec(choices=3))
    desk.start()
    desk.arrive(frame(0, [5], choice=0))
    desk.arrive(frame(0, [6, 7], choice=1, finish="length"))
    failure = Failure(code="Internal", message="broken")
    key = SequenceKey(request=REQUEST, attempt=1, choice=2)
    out = desk.arrive(Frame(key=key, first_position=0, finish="error", error=failure))
    assert {a.message.choice for a in of(out, ev.SendAbort)} == {2}
    desk.wait(100)
    (submit,) = of(desk.place(OTHER_ROUTE), ev.SendSubmit)
    assert [start.choice for start in submit.message.choices] == [2]
    desk.arrive(frame(0, [8], choice=2, attempt=2, finish="stop"), OTHER)
    desk.arrive(frame(1, [9], choice=0, attempt=1, finish="stop"))
    assert [desk.tokens(choice) for choice in range(3)] == [[5, 9], [6, 7], [8]]
    assert desk.ends() == [ev.Ended(ev.Completed())]


def test_of_choices_that_are_lost_each_is_stopped_by_itself() -> None:
    desk = Desk(spec(choices=3))
    desk.start()
    for choice, worker in enumerate((DECODE, DECODE, OTHER)):
        desk.arrive(frame(0, [5], choice=choice), worker)
    aborts = of(desk.feed(ev.WorkerLost(DECODE)), ev.SendAbort)
    told = {(abort.worker, abort.message.choice) for abort in aborts}
    assert told == {(PREFILL, 0), (PREFILL, 1)}


def test_a_choice_that_lost_only_its_end_ends_without_another_worker() -> None:
    desk = Desk(spec(stop_tokens=(3,), max_tokens=10))
    desk.start()
    desk.arrive(frame(0, [5, 3]))
    desk.feed(ev.WorkerLost(DECODE))
    assert desk.ends() == [ev.Ended(ev.Completed())]


def test_a_stop_token_among_those_that_must_come_is_no_end() -> None:
    given = spec(stop_tokens=(3,), max_tokens=10)
    desk = Desk(replace(given, sampling=structs.replace(given.sampling, min_tokens=2)))
    desk.start()
    desk.arrive(frame(0, [5, 3]))
    desk.feed(ev.WorkerLost(DECODE))
    assert desk.ends() == []
    assert of(desk.wait(100), ev.ChooseRoute)


def test_log_probabilities_keep_to_their_tokens_when_a_frame_overlaps(desk: Desk) -> None:
    desk.start()
    scores = TopLogprobs(
        chosen=np.array([-1, -2, -3], "<f4").tobytes(),
        width=2,
        top_tokens=pack(range(6)),
        top_values=np.arange(6, dtype="<f4").tobytes(),
    )
    desk.arrive(frame(0, [5]))
    (delivered,) = of(desk.arrive(frame(0, [5, 6, 7], logprobs=scores)), ev.Deliver)
    assert delivered.logprobs is not None
    assert np.frombuffer(delivered.logprobs.chosen, "<f4").tolist() == [-2, -3]
    assert unpack(delivered.logprobs.top_tokens).tolist() == [2, 3, 4, 5]
    assert np.frombuffer(delivered.logprobs.top_values, "<f4").tolist() == [2, 3, 4, 5]


def test_an_own_stop_token_is_named_and_an_end_token_is_not() -> None:
    for own, reason in (((3,), 3), ((), None)):
        desk = Desk(spec(stop_tokens=(3,), own_stops=own))
        desk.start()
        out = desk.arrive(frame(0, [5, 3], finish="stop", stop_token=3))
        (ended,) = of(out, ev.ChoiceEnded)
        assert (ended.finish, ended.stop_reason) == ("stop", reason)
        (delivered,) = of(out, ev.Deliver)
        assert delivered.hidden_count == 1


def test_what_is_tried_again_has_the_weights_of_the_choices_that_go_on() -> None:
    desk = Desk(spec(choices=2))
    desk.start()
    gone = Failure(code="Gone", message="preempted")
    desk.arrive(structs.replace(frame(0, [], choice=1), error=gone))
    (choose,) = of(desk.wait(LIMITS.backoff_ms), ev.ChooseRoute)
    assert choose.model_root == ROUTE.model_root, "choice 0 may be answered by now"
    desk.feed(ev.WorkerLost(PREFILL), ev.WorkerLost(DECODE))
    desk.feed(ev.Unroutable(Busy("nobody with those weights"), expected=False))
    (choose,) = of(desk.wait(1_000), ev.ChooseRoute)
    assert choose.model_root is None, "nothing was delivered, and nobody goes on"
