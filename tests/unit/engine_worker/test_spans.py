"""What the spans of sequences say of their steps."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.unit.engine_worker.bench import REQUEST, Bench, finished, opened, result_of, submit
from tests.unit.engine_worker.test_accepted_drafts import drew
from tests.unit.engine_worker.test_runs import decoding, plan_of
from tests.unit.pager.rig import order_of

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker import spans
from pagemesh.engine.worker.actor import Surroundings, WorkerBehaviour
from pagemesh.engine.worker.plan import StepPlan, StepResult, plan_after
from pagemesh.engine.worker.spans import SequenceSpans
from pagemesh.engine.worker.stepper import PoolingExecutor
from pagemesh.runtime import semconv
from pagemesh.runtime.bus.messages import Answering, Delivery
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.trace import TRACEPARENT, TraceContext
from pagemesh.wire import codec, subjects
from pagemesh.wire.messages import Message, Ok, Refused, SequenceKey
from pagemesh.wire.pager_messages import (
    Admit,
    Declare,
    Extend,
    Extended,
    Fill,
    Granted,
    OpenSession,
    Queued,
    Release,
    Waterfall,
)
from pagemesh.wire.pager_reports import InspectWorker, WorkerReport

FACTS = ev.SequenceFacts(10, 5, 8, 6, 0, 0, 0, "length", "")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Name to what was said of the last span of that name."""
    found: dict[str, dict[str, Any]] = {}

    def record(name: str, context: TraceContext, **said: Any) -> None:
        found[name] = said

    monkeypatch.setattr(spans, "record_span", record)
    return found


def watched(bench: Bench) -> SequenceSpans:
    made = SequenceSpans("decode", "d", life_count_max=10)
    made.begin([plan_of(bench).rows[0].key], TraceContext(1, 2, 0, sampled=True), 0)
    made.step_began(plan_of(bench), 5)
    return made


def steps_of(bench: Bench, *tokens: tuple[int, ...]) -> list[tuple[StepPlan, StepResult]]:
    steps = []
    for own in tokens:
        plan = plan_of(bench)
        steps.append((plan, drew(bench, *own)))
        bench.plan = plan_after(*steps[-1])
    return steps


def test_a_decode_span_counts_what_was_drawn_and_drafted_and_right(
    recorded: dict[str, dict[str, Any]],
) -> None:
    bench = decoding()
    key, made = plan_of(bench).rows[0].key, watched(bench)
    made.steps_ended(steps_of(bench, (52,), (53, 54, 55, 56), (57, 58)), 10)
    made.end(key, FACTS, 20)
    said = recorded["decode"]["attributes"]
    assert said[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] == 1 + 4 + 2
    assert said[semconv.PAGEMESH_TOKENS_DRAFTED] == 1 + 4 + 2
    assert said[semconv.PAGEMESH_TOKENS_ACCEPTED] == 0 + 3 + 1


def test_events_come_every_so_many_tokens_whatever_a_step_draws(
    recorded: dict[str, dict[str, Any]],
) -> None:
    bench = decoding(max_tokens=90, pages=40)
    key, made = plan_of(bench).rows[0].key, watched(bench)
    made.steps_ended(steps_of(bench, *[tuple(range(60, 65))] * 6), 10)
    made.steps_ended([(plan_of(bench), drew(bench, 7, 8, 9))], 30)
    made.end(key, FACTS, 40)
    noted = [(event.name, event.attributes.get("count")) for event in recorded["decode"]["events"]]
    assert noted == [("first token", None), ("tokens", 33)]


def test_what_was_revoked_counts_for_nothing(recorded: dict[str, dict[str, Any]]) -> None:
    bench = decoding()
    plan, made = plan_of(bench), watched(bench)
    row = replace(result_of(plan, 52).rows[0], revoked=True, drawn=(), drafted_count=4)
    made.steps_ended([(plan, StepResult(plan.step, (row,)))], 10)
    made.end(plan.rows[0].key, FACTS, 20)
    said = recorded["decode"]["attributes"]
    assert said[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] == said[semconv.PAGEMESH_TOKENS_DRAFTED] == 0


def test_choices_of_a_request_have_spans_of_their_own_under_their_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[TraceContext] = []
    monkeypatch.setattr(spans, "record_span", lambda _name, context, **_: found.append(context))
    made = SequenceSpans("decode", "d", life_count_max=10)
    keys = [SequenceKey(request="1", attempt=1, choice=choice) for choice in range(3)]
    made.begin(keys, TraceContext(1, 2, 9, sampled=True), 0)
    for key in keys:
        made.end(key, FACTS, 20)
    own = [one for one in found if one.parent_id == 9]
    assert len({one.span_id for one in own}) == 3
    assert {one.trace_id for one in found} == {1}


def test_pages_that_a_step_still_uses_at_the_end_are_given_back_in_the_same_trace(
    recorded: dict[str, dict[str, Any]],
) -> None:
    key = SequenceKey(request=REQUEST, attempt=1, choice=0)
    fill = Fill(filled_tokens=0, first_token=0)
    release = Release(key=key, worker="d", incarnation=1, lease=7, fill=fill)
    made = SequenceSpans("decode", "d", life_count_max=10)
    made.begin([key], TraceContext(1, 2, 0, sampled=True), 0)
    made.end(key, replace(FACTS, finish="abort"), 10)
    call = made.call(release, 20)
    assert call is not None
    assert (call.context.trace_id, call.context.parent_id) == (1, 2)
    made.answered(call, Ok(), 30)
    assert (recorded["release"]["start_us"], recorded["release"]["end_us"]) == (20, 30)
    assert made.call(release, 40) is None, "once"


def test_pages_that_were_granted_anew_after_a_release_are_given_back_in_the_same_trace() -> None:
    key = SequenceKey(request=REQUEST, attempt=1, choice=0)
    fill = Fill(filled_tokens=0, first_token=0)
    release = Release(key=key, worker="d", incarnation=1, lease=7, fill=fill)
    granted = Granted(key=key, lease=8, lease_slot=0, granted_at=1, extents=b"", cached_tokens=0)
    made = SequenceSpans("decode", "d", life_count_max=10)
    made.begin([key], TraceContext(1, 2, 0, sampled=True), 0)
    assert made.call(release, 10) is not None
    made.granted_unasked(granted, 20)
    made.end(key, replace(FACTS, finish="abort"), 30)
    assert made.call(msgspec.structs.replace(release, lease=8), 40) is not None


def test_leases_are_declared_and_told_with_the_trace_of_whoever_is_sampled() -> None:
    bench = Bench().start()
    for name in (1, 2):
        bench.ask(msgspec.structs.replace(submit(10), request=f"{name:032x}"))
        bench.grant()
    sampled, other = (SequenceKey(request=f"{name:032x}", attempt=1, choice=0) for name in (1, 2))
    made = SequenceSpans("decode", "d", life_count_max=10)
    made.begin([sampled], TraceContext(0xABC, 2, 0, sampled=True), 0)
    made.begin([other], TraceContext(0xDEF, 2, 0, sampled=False), 0)
    wanted = {sampled: f"{0xABC:032x}", other: ""}

    report = bench.ask(InspectWorker())
    assert isinstance(report, WorkerReport)
    assert {line.key: line.trace for line in made.with_traces(report).leases} == wanted
    bench.handle(ev.PagerChanged(2))
    bench.tick()
    bench.answer(OpenSession, opened(epoch=2))
    bench.tick()
    declared = made.declared(bench.asked(Declare))
    assert isinstance(declared, Declare)
    assert {line.key: line.trace for line in declared.leases} == wanted
    assert made.declared(TestAsking.ADMIT) is TestAsking.ADMIT


@pytest.mark.parametrize("ended", [False, True])
async def test_what_is_asked_again_after_its_end_begins_no_span(ended: bool) -> None:
    bench = finished() if ended else decoding()
    key = SequenceKey(request=REQUEST, attempt=1, choice=0)
    made = SequenceSpans("decode", "me", life_count_max=10)
    sent: list[object] = []
    bus = SimpleNamespace(
        publish=lambda *said, **_: sent.append(said), message_bytes_max=1 << 20,
        config=SimpleNamespace(output_bytes_max=1 << 20), together=contextlib.nullcontext,
    )  # fmt: skip
    around = SimpleNamespace(
        bus=bus, clock=MonotonicClock(), name="me", host="h",
        grammars=SimpleNamespace(vocab_tokens=1_000),
        turns=SimpleNamespace(thread_count=1), step_us_max=1, stream_ms=0, admit=lambda _: None,
        on_state=lambda: None,
    )  # fmt: skip
    behaviour = WorkerBehaviour(
        cast(Surroundings, around), bench.core, cast(PoolingExecutor, None), made
    )
    await behaviour.handle(
        Delivery(
            cast(Answering, bus), subjects.worker("me"), "inbox", codec.encode(submit(10)),
            {TRACEPARENT: TraceContext(1, 2, 0, sampled=True).traceparent},
        )
    )  # fmt: skip
    assert len(sent) >= 1, "it is accepted once more"
    assert (made.call(msgspec.structs.replace(TestAsking.ADMIT, key=key), 9) is None) == ended


class TestAsking:
    """For pages, while the pager is away for some time."""

    KEY = SequenceKey(request="1", attempt=1, choice=0)
    ADMIT = Admit(
        key=KEY, order=order_of(1), worker="d", incarnation=1, epoch=1, root=b"", tokens=b"",
        reserve_tokens=1, deadline_ms=1_000,
    )  # fmt: skip
    AWAY = Refused(code="Disconnected", message="away")

    @pytest.fixture
    def told(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
        found: list[tuple[str, dict[str, Any]]] = []
        monkeypatch.setattr(
            spans, "record_span", lambda name, _, **said: found.append((name, said))
        )
        return found

    def asked(self, made: SequenceSpans, at_us: int, *answers: Message) -> None:
        """An answer comes a microsecond after its call."""
        for number, answer in enumerate(answers):
            call = made.call(self.ADMIT, at_us + 2 * number)
            assert call is not None
            made.answered(call, answer, at_us + 2 * number + 1)

    def begun(self) -> SequenceSpans:
        made = SequenceSpans("prefill", "d", life_count_max=10)
        made.begin([self.KEY], TraceContext(1, 2, 0, sampled=True), 0)
        return made

    def test_is_one_span_however_often_it_is_tried(
        self, told: list[tuple[str, dict[str, Any]]]
    ) -> None:
        made, queued = self.begun(), Queued(key=self.KEY, ahead_count=0, ask_again_ms=9)
        granted = Granted(
            key=self.KEY, lease=7, lease_slot=0, granted_at=1, extents=b"", cached_tokens=0,
            waterfall=Waterfall(),
        )  # fmt: skip
        self.asked(made, 5, self.AWAY, self.AWAY, queued, granted)
        ((_, admit),) = [one for one in told if one[0] == "admit"]
        assert (admit["start_us"], admit["end_us"], admit["error"]) == (5, 12, "")
        assert admit["attributes"]["pagemesh.admit.tries"] == 4
        assert admit["attributes"][semconv.PAGEMESH_LEASE] == "7"

    @pytest.mark.parametrize("ended_by", ["", "Preempted", "Cancelled"])
    def test_for_more_of_them_is_one_span_that_lasts_as_long_as_the_wait(
        self, told: list[tuple[str, dict[str, Any]]], ended_by: str
    ) -> None:
        made, queued = self.begun(), Queued(key=self.KEY, ahead_count=0, ask_again_ms=9)
        extend = Extend(
            key=self.KEY, worker="d", incarnation=1, lease=7, have_pages=1, page_count=3
        )
        contexts = set()
        for at_us in (5, 15):
            call = made.call(extend, at_us)
            assert call is not None
            contexts.add(call.context)
            made.answered(call, queued, at_us + 1)
        if ended_by == "Preempted":
            made.preempted(self.KEY, "room", 3, 40)
        elif ended_by == "Cancelled":
            made.end(self.KEY, FACTS, 40)
        else:
            notice = Extended(key=self.KEY, lease=7, granted_at=3, first_index=1, extents=b"")
            made.extended_unasked(notice, 40)
        made.end(self.KEY, FACTS, 90)
        ((_, span),) = [one for one in told if one[0] == "extend"]
        assert (span["start_us"], span["end_us"], span["error"]) == (5, 40, ended_by)
        assert len(contexts) == 1, "what the pager says of each try is below the same span"

    def test_after_a_preemption_the_sequence_goes_on_telling_what_the_first_one_found(
        self, told: list[tuple[str, dict[str, Any]]]
    ) -> None:
        made = self.begun()
        for delivered in (4, 16):
            granted = Granted(
                key=self.KEY, lease=7, lease_slot=0, granted_at=1, extents=b"",
                cached_tokens=delivered, waterfall=Waterfall(delivered_tokens=delivered),
            )  # fmt: skip
            self.asked(made, 5, granted)
            made.preempted(self.KEY, "preempted", 12, 8)
        made.end(self.KEY, FACTS, 20)
        name, said = told[-1]
        assert name == "prefill sequence"
        assert said["attributes"][semconv.PAGEMESH_TOKENS_DELIVERED] == 4

    def test_is_waited_for_in_the_queue_again_from_a_preemption_on(
        self, told: list[tuple[str, dict[str, Any]]]
    ) -> None:
        made = self.begun()
        granted = Granted(
            key=self.KEY, lease=7, lease_slot=0, granted_at=1, extents=b"", cached_tokens=0,
            waterfall=Waterfall(),
        )  # fmt: skip
        self.asked(made, 5, granted)
        told.clear()
        made.preempted(self.KEY, "preempted", 12, 8)
        self.asked(made, 20, granted)
        ((_, queue),) = [one for one in told if one[0] == "queue"]
        assert (queue["start_us"], queue["end_us"]) == (8, 20)

    def test_does_not_look_granted_when_the_sequence_ends_before_it_is_answered(
        self, told: list[tuple[str, dict[str, Any]]]
    ) -> None:
        for answers in ((), (Queued(key=self.KEY, ahead_count=0, ask_again_ms=9),)):
            told.clear()
            made = self.begun()
            self.asked(made, 5, *answers)
            made.call(self.ADMIT, 20)
            made.end(self.KEY, FACTS, 30)
            ((_, admit),) = [one for one in told if one[0] == "admit"]
            assert (admit["end_us"], admit["error"]) == (30, "Cancelled")

    def test_ends_with_the_notice_that_ends_a_wait_in_the_queue(
        self, told: list[tuple[str, dict[str, Any]]]
    ) -> None:
        made, queued = self.begun(), Queued(key=self.KEY, ahead_count=0, ask_again_ms=9)
        granted = Granted(
            key=self.KEY, lease=7, lease_slot=0, granted_at=1, extents=b"", cached_tokens=0,
        )  # fmt: skip
        self.asked(made, 5, queued)
        call = made.call(self.ADMIT, 10)
        assert call is not None
        made.granted_unasked(granted, 15)
        assert not [one for one in told if one[0] == "admit"], "its answer is on its way"
        made.answered(call, queued, 20)
        made.granted_unasked(granted, 30)
        made.granted_unasked(granted, 40)
        ((_, admit),) = [one for one in told if one[0] == "admit"]
        assert (admit["start_us"], admit["end_us"], admit["error"]) == (5, 30, "")

    def test_is_a_second_span_where_a_notice_was_taken_for_a_hint_and_ends_with_its_own_notice(
        self, told: list[tuple[str, dict[str, Any]]]
    ) -> None:
        made, queued = self.begun(), Queued(key=self.KEY, ahead_count=0, ask_again_ms=9)
        granted = Granted(
            key=self.KEY, lease=7, lease_slot=0, granted_at=1, extents=b"", cached_tokens=0,
        )  # fmt: skip
        self.asked(made, 5, queued)
        made.granted_unasked(granted, 15)
        self.asked(made, 20, queued)
        made.granted_unasked(granted, 30)
        made.end(self.KEY, FACTS, 90)
        admits = [one for name, one in told if name == "admit"]
        assert [one["end_us"] for one in admits] == [15, 30]
        assert [one["error"] for one in admits] == ["", ""]

    def test_is_one_span_after_a_preemption_where_every_notice_is_a_hint(
        self, told: list[tuple[str, dict[str, Any]]]
    ) -> None:
        made, queued = self.begun(), Queued(key=self.KEY, ahead_count=0, ask_again_ms=9)
        granted = Granted(
            key=self.KEY, lease=7, lease_slot=0, granted_at=1, extents=b"", cached_tokens=0,
            waterfall=Waterfall(),
        )  # fmt: skip
        self.asked(made, 5, queued)
        made.granted_unasked(granted, 15)
        made.preempted(self.KEY, "preempted", 3, 18)
        self.asked(made, 20, queued)
        made.granted_unasked(granted, 30)
        self.asked(made, 35, granted)
        made.end(self.KEY, FACTS, 90)
        admits = [one for name, one in told if name == "admit"]
        assert [one["end_us"] for one in admits] == [15, 36]

    def test_says_why_there_are_none_when_the_sequence_is_given_back(
        self, told: list[tuple[str, dict[str, Any]]]
    ) -> None:
        made = self.begun()
        self.asked(made, 5, self.AWAY, self.AWAY)
        late = made.call(self.ADMIT, 20)
        made.end(self.KEY, FACTS, 30)
        assert late is not None
        made.answered(late, self.AWAY, 40)
        assert [name for name, _ in told] == ["queue", "admit", "prefill sequence"]
        admit = told[1][1]
        assert (admit["end_us"], admit["error"]) == (30, "Disconnected")
        assert admit["attributes"]["pagemesh.admit.tries"] == 3
