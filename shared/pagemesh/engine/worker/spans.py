"""Spans of sequences, from times noted as the actor passes on events and commands.

    prefill | decode sequence one sequence at this worker
      queue                   until pages were asked for; and from pages until its first step
      admit | redeem          until the pages were there
      prefill chunk           one per step
      commit, extend, fork,   one per call (an extend waits for its pages); parent of the span of
      ticket, attach, ...     the pager or the other worker
      decode                  first decode step to the end, with events, not a span per token

Nothing here runs on the step thread; a thread of ``runtime.spans`` builds and exports the spans.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from pagemesh.engine.worker.events import SequenceFacts
from pagemesh.engine.worker.plan import StepPlan, StepResult, StepRow
from pagemesh.runtime import semconv
from pagemesh.runtime.spans import Attribute, SpanEvent, record_span
from pagemesh.runtime.trace import TraceContext
from pagemesh.wire.messages import Message, Refused, SequenceKey
from pagemesh.wire.pager_messages import (
    Admit,
    Commit,
    Declare,
    Extend,
    Extended,
    Fork,
    Granted,
    Offer,
    Queued,
    Redeem,
    Release,
    Waterfall,
    Withdraw,
)
from pagemesh.wire.pager_reports import WorkerReport
from pagemesh.wire.work_messages import Attach

_NAMES: dict[type[Message], str] = {
    Admit: "admit",
    Redeem: "redeem",
    Commit: "commit",
    Extend: "extend",
    Fork: "fork",
    Offer: "ticket",
    Withdraw: "withdraw",
    Attach: "attach",
    Release: "release",
}
_EVENTS_MAX = 128
_EVENT_EVERY_TOKENS = 32


@dataclass(slots=True)
class OpenCall:
    """A call whose span ends with its answer. All calls of an admission share one, until the pages
    come."""

    name: str
    key: SequenceKey
    context: TraceContext
    started_us: int
    tries: int = 0
    """Calls of an admission so far; 0: another kind of call."""
    is_queued: bool = False
    """The last try was answered ``Queued``: the pages will come with a notice."""
    error: str = ""


@dataclass(slots=True)
class _Life:
    """What is known of one sequence; times are monotonic microseconds."""

    context: TraceContext
    started_us: int
    queued_us: int | None
    """Since when it has waited for pages or for its next step; None: it does not."""
    asking: OpenCall | None = None
    """The admission that is under way, which may take several calls."""
    waiting: dict[str, OpenCall] = field(default_factory=dict)
    """Other calls that were answered ``Queued``, by name. Asking again goes on with the same."""
    granted: bool = False
    hinted: bool = False
    """``granted`` was set by a notice, which the core may have taken for a mere hint."""
    step_us: int = 0
    drawn: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_us: int | None = None
    released: bool = False
    """Its pages were given back. A step that still uses them puts that off, past the end too."""
    waterfall: Waterfall = field(default_factory=Waterfall)
    events: list[SpanEvent] = field(default_factory=list)

    def note(self, name: str, at_us: int, **attributes: Attribute) -> None:
        if len(self.events) < _EVENTS_MAX:
            self.events.append(SpanEvent(name, at_us, attributes))


class SequenceSpans:
    """``at_us`` is always the time of the event. A sequence that is not sampled costs a lookup."""

    def __init__(self, role: str, worker: str, *, life_count_max: int) -> None:
        self._role = role
        self._worker = worker
        self._lives: OrderedDict[SequenceKey, _Life] = OrderedDict()
        self._life_count_max = life_count_max
        self._unreleased: OrderedDict[SequenceKey, TraceContext] = OrderedDict()
        """Of sequences that ended amid a step: their pages are given back when it has ended."""

    def begin(self, keys: Iterable[SequenceKey], context: TraceContext, at_us: int) -> None:
        """Sequences were submitted or attached under ``context``, this hop's own span; those
        already known keep theirs."""
        if not context.sampled:
            return
        for index, key in enumerate(key for key in keys if key not in self._lives):
            own = context if index == 0 else _sibling(context)
            self._lives[key] = _Life(own, at_us, at_us)
            while len(self._lives) > self._life_count_max:
                self._lives.popitem(last=False)

    def drop(self, keys: Iterable[SequenceKey]) -> None:
        """Forget sequences that were refused: the span of whoever asked says so."""
        for key in keys:
            self._lives.pop(key, None)

    def with_traces(self, report: WorkerReport) -> WorkerReport:
        """``report`` with the trace of each sequence that is sampled."""
        leases = [
            msgspec.structs.replace(line, trace=self._trace(line.key)) for line in report.leases
        ]
        return msgspec.structs.replace(report, leases=leases)

    def declared(self, message: Message) -> Message:
        """``message``; a ``Declare`` with the trace of each sampled sequence, for a pager that does
        not know it yet."""
        if not isinstance(message, Declare) or not self._lives:
            return message
        leases = [
            msgspec.structs.replace(line, trace=self._trace(line.key)) for line in message.leases
        ]
        return msgspec.structs.replace(message, leases=leases)

    def _trace(self, key: SequenceKey) -> str:
        life = self._lives.get(key)
        return "" if life is None else f"{life.context.trace_id:032x}"

    # Calls ----------------------------------------------------------------------------------

    def call(self, message: Message, at_us: int) -> OpenCall | None:
        """A call is made. Its context is to be sent along; None: it is not traced."""
        name, key = _NAMES.get(type(message)), getattr(message, "key", None)
        if name is None or key is None:
            return None
        life = self._lives.get(key)
        if life is None:
            ended = self._unreleased.pop(key, None) if isinstance(message, Release) else None
            return None if ended is None else OpenCall(name, key, ended.child(), at_us)
        if isinstance(message, Release):
            life.released = True
        if not isinstance(message, Admit | Redeem):
            held = life.waiting.pop(name, None)
            return held or OpenCall(name, key, life.context.child(), at_us)
        if life.asking is None:
            self._queue_ends(life, at_us)
            if life.hinted:
                life.granted = life.hinted = False
            life.asking = OpenCall(name, key, life.context.child(), at_us)
        life.asking.tries += 1
        life.asking.is_queued = False
        return life.asking

    def answered(self, call: OpenCall, message: Message, at_us: int) -> None:
        """``call`` was answered. ``Queued`` does not end its span, nor does a refusal of pages: it
        goes on until a notice or a later call brings them, or the sequence ends. One span per try
        would bury the trace while the pager is away."""
        call.error = message.code if isinstance(message, Refused) else ""
        call.is_queued = isinstance(message, Queued)
        life = self._lives.get(call.key)
        if not call.tries:
            if call.is_queued and life is not None:
                life.waiting[call.name] = call
            else:
                self._record(call, at_us)
        elif isinstance(message, Granted) and life is not None and life.asking is call:
            if not life.granted:
                life.waterfall, life.granted = message.waterfall, True
            life.asking, life.queued_us, life.released = None, at_us, False
            granted: dict[str, Attribute] = {semconv.PAGEMESH_LEASE: f"{message.lease:x}"}
            self._record(call, at_us, _waterfall(message.waterfall) | granted)

    def _record(self, call: OpenCall, at_us: int, more: dict[str, Attribute] | None = None) -> None:
        attributes = self._who(call.key) | (more or {})
        if call.tries:
            attributes[f"pagemesh.{call.name}.tries"] = call.tries
        record_span(
            call.name, call.context, start_us=call.started_us, end_us=at_us, kind="client",
            attributes=attributes, error=call.error,
        )  # fmt: skip

    def granted_unasked(self, message: Granted, at_us: int) -> None:
        """A notice brought pages that the gateway had asked for, or that the sequence was queued
        for. If a call for them is open, its answer ends its span instead. If the core takes the
        notice for a hint and asks again, which is rare, that call gets a second span."""
        life = self._lives.get(message.key)
        if life is None or life.granted or (life.asking is not None and not life.asking.is_queued):
            return
        if life.asking is None:
            context = life.context.child()
            life.asking = OpenCall("admit", message.key, context, life.started_us, tries=1)
        self.answered(life.asking, message, at_us)
        life.hinted = True

    def extended_unasked(self, message: Extended, at_us: int) -> None:
        """A notice brought the pages that an ``Extend`` was queued for."""
        life = self._lives.get(message.key)
        call = None if life is None else life.waiting.pop(_NAMES[Extend], None)
        if call is not None:
            self._record(call, at_us)

    # Steps ----------------------------------------------------------------------------------

    def step_began(self, plan: StepPlan, at_us: int) -> None:
        for row in plan.rows if self._lives else ():
            life = self._lives.get(row.key)
            if life is None:
                continue
            life.step_us = at_us
            self._queue_ends(life, at_us)
            if life.decode_us is None and _is_decode(row):
                life.decode_us = at_us

    def steps_ended(self, steps: Iterable[tuple[StepPlan, StepResult]], at_us: int) -> None:
        for plan, result in steps if self._lives else ():
            self._step_ended(plan, result, at_us)

    def _step_ended(self, plan: StepPlan, result: StepResult, at_us: int) -> None:
        before: SequenceKey | None = None
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            life = self._lives.get(row.key)
            if life is None or row.key == before:  # another beam of the same search
                continue
            before = row.key
            if not _is_decode(row):
                self._chunk(row, life, outcome.revoked, at_us)
            if outcome.drawn:
                life.drafted += outcome.drafted_count
                life.accepted += result.accepted_count(outcome)
                self._drew(life, 1 + len(outcome.before), at_us)

    @staticmethod
    def _drew(life: _Life, count: int, at_us: int) -> None:
        noted = life.drawn // _EVENT_EVERY_TOKENS
        if not life.drawn:
            life.note("first token", at_us)
        life.drawn += count
        if life.drawn // _EVENT_EVERY_TOKENS > noted:
            life.note("tokens", at_us, count=life.drawn)

    def preempted(self, key: SequenceKey, reason: str, lost_tokens: int, at_us: int) -> None:
        life = self._lives.get(key)
        if life is not None:
            life.hinted = False
            self._waits_end(life, "Preempted", at_us)
            life.note("preempted", at_us, reason=reason, lost_tokens=lost_tokens)
            life.queued_us = at_us

    def end(self, key: SequenceKey, facts: SequenceFacts, at_us: int) -> None:
        """The sequence ended here: record its span, and that of its decoding."""
        life = self._lives.pop(key, None)
        if life is None:
            return
        if facts.finish and not life.released:
            self._unreleased[key] = life.context
            while len(self._unreleased) > self._life_count_max:
                self._unreleased.popitem(last=False)
        if life.asking is not None:
            life.asking.error = life.asking.error or "Cancelled"
            self._record(life.asking, at_us)
        self._waits_end(life, "Cancelled", at_us)
        attributes = self._who(key) | _waterfall(life.waterfall) | _facts(facts)
        if life.decode_us is not None:
            record_span(
                "decode", life.context.child(), start_us=life.decode_us, end_us=at_us,
                attributes=self._who(key) | {
                    semconv.GEN_AI_USAGE_OUTPUT_TOKENS: life.drawn,
                    semconv.PAGEMESH_TOKENS_DRAFTED: life.drafted,
                    semconv.PAGEMESH_TOKENS_ACCEPTED: life.accepted,
                },
                events=life.events,
            )  # fmt: skip
        record_span(
            f"{self._role} sequence", life.context, start_us=life.started_us, end_us=at_us,
            attributes=attributes, events=() if life.decode_us is not None else life.events,
            kind="server", error=facts.error_code,
        )  # fmt: skip

    def _chunk(self, row: StepRow, life: _Life, revoked: bool, at_us: int) -> None:
        record_span(
            "prefill chunk", life.context.child(), start_us=life.step_us, end_us=at_us,
            attributes=self._who(row.key) | {
                semconv.PAGEMESH_TOKENS_COMPUTED: len(row.tokens),
                "pagemesh.tokens.start": row.start,
                semconv.PAGEMESH_PAGE_COUNT: len(row.page_table),
            },
            error="Stale" if revoked else "",
        )  # fmt: skip

    def _waits_end(self, life: _Life, error: str, at_us: int) -> None:
        """What calls were queued for does not come any more."""
        for call in life.waiting.values():
            call.error = error
            self._record(call, at_us)
        life.waiting.clear()

    def _queue_ends(self, life: _Life, at_us: int) -> None:
        if life.queued_us is not None:
            context = life.context.child()
            record_span("queue", context, start_us=life.queued_us, end_us=at_us)
            life.queued_us = None

    def _who(self, key: SequenceKey) -> dict[str, Attribute]:
        return {
            semconv.PAGEMESH_REQUEST: key.request,
            semconv.PAGEMESH_ATTEMPT: key.attempt,
            semconv.PAGEMESH_CHOICE: key.choice,
            semconv.PAGEMESH_WORKER: self._worker,
        }


def _is_decode(row: StepRow) -> bool:
    """One token, drawn from, after at least one generated token."""
    return len(row.tokens) == 1 and any(sample.generated_count for sample in row.samples)


def _sibling(context: TraceContext) -> TraceContext:
    """A span of its own beside ``context``, under the same caller."""
    fresh = context.child()
    return TraceContext(context.trace_id, fresh.span_id, context.parent_id, context.sampled)


def _waterfall(waterfall: Waterfall) -> dict[str, Attribute]:
    more: dict[str, Attribute] = {
        f"{semconv.PAGEMESH_TOKENS_LOST}.{reason}": count
        for reason, count in waterfall.lost.items()
    }
    if waterfall.awaited_tokens or waterfall.awaited_ms:
        more[semconv.PAGEMESH_IN_FLIGHT_TOKENS] = waterfall.awaited_tokens
        more[semconv.PAGEMESH_IN_FLIGHT_WAITED_MS] = waterfall.awaited_ms
    if waterfall.fetched_tokens:
        more[semconv.PAGEMESH_DISK_TOKENS] = waterfall.fetched_tokens
    return {
        semconv.PAGEMESH_TOKENS_AVAILABLE: waterfall.available_tokens,
        semconv.PAGEMESH_TOKENS_SELECTED: waterfall.selected_tokens,
        semconv.PAGEMESH_TOKENS_DELIVERED: waterfall.delivered_tokens,
    } | more


def _facts(facts: SequenceFacts) -> dict[str, Attribute]:
    return {
        semconv.GEN_AI_USAGE_INPUT_TOKENS: facts.prompt_tokens,
        semconv.GEN_AI_USAGE_OUTPUT_TOKENS: facts.generated_tokens,
        semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: facts.cached_tokens,
        semconv.PAGEMESH_TOKENS_COMPUTED: facts.computed_tokens,
        semconv.GEN_AI_RESPONSE_FINISH_REASONS: [facts.finish or "handed"],
        "pagemesh.pages.saved": facts.saved_pages,
        "pagemesh.preemption.count": facts.preempted_count,
        "pagemesh.preemption.lost_tokens": facts.lost_tokens,
    }
