"""``WorkerCore``: the scheduler of a worker, for both roles.

Pure: call ``take(event, now_ms)`` for one event or several, then ``go_on()``. Both return commands
to perform in order; they are separate so that first tokens are sent before the next step is
planned. The result depends on nothing but the events and their order. See ``desk`` for the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pagemesh.engine.worker import (
    admission,
    ending,
    fork,
    frames,
    handover,
    leases,
    session,
    steps,
)
from pagemesh.engine.worker.batching import Batching
from pagemesh.engine.worker.desk import Desk
from pagemesh.engine.worker.events import (
    Answer,
    CallPager,
    Command,
    Drain,
    Drained,
    Event,
    GatewayLost,
    PagerAnswered,
    PagerChanged,
    PagerLost,
    PeerAnswered,
    PoolMissing,
    Received,
    StepsFinished,
    Tick,
    WorkerLost,
)
from pagemesh.engine.worker.inspection import report
from pagemesh.engine.worker.intake import Intake, waiting_tokens
from pagemesh.engine.worker.lease import Hold
from pagemesh.engine.worker.sequence import RUNNABLE, Owner, Phase, Sequence
from pagemesh.engine.worker.session import Session
from pagemesh.engine.worker.settings import RoleSettings, WorkerIdentity, WorkerLimits
from pagemesh.wire.errors import Busy, DeadlineExceeded, Fault, Gone, Malformed
from pagemesh.wire.messages import Message, Ok, Refused, SequenceKey, name_of
from pagemesh.wire.pager_messages import (
    Extended,
    Granted,
    Queued,
    Release,
    Revoke,
    TicketClosed,
)
from pagemesh.wire.pager_reports import InspectWorker
from pagemesh.wire.presence import Load, PageNeeds
from pagemesh.wire.work_messages import Abort, Attach, Resend, Submit

_ASKING = frozenset({
    Phase.WAITING, Phase.ADMITTING, Phase.FORKING, Phase.OFFERING, Phase.WITHDRAWING,
    Phase.REDEEMING,
})  # fmt: skip
"""Phases that need an answer of the pager to go on."""


class WorkerCore:
    """``make_ticket`` returns an unguessable name of 32 hexadecimal digits, never one twice."""

    def __init__(
        self,
        identity: WorkerIdentity,
        role: RoleSettings,
        limits: WorkerLimits,
        make_ticket: Callable[[], str],
    ) -> None:
        self._desk = Desk(identity, role, limits, make_ticket)
        self._session = Session(self._desk)
        self._intake = Intake(self._desk)
        self._batching = Batching(
            step_tokens_max=role.step_tokens_max,
            chunk_tokens_max=role.chunk_tokens_max,
            rows_max=limits.step_rows_max,
            itl_target_ms=limits.itl_target_ms,
            stream_ms=limits.stream_ms,
        )
        self._drain_until_ms = 0.0
        self._drained = False

    @property
    def ready(self) -> bool:
        """The session with the pager is open, the pager is there, and new work is accepted."""
        session = self._session
        is_away = session.away_ms >= self._desk.limits.pager_away_ms
        return session.open and not is_away and not self._intake.draining

    @property
    def load(self) -> Load:
        desk = self._desk
        running = len(desk.running)
        return Load(
            running_count=running,
            waiting_count=len(desk.live) - running,
            waiting_tokens=waiting_tokens(desk),
            sequence_count_max=desk.limits.sequences_max,
        )

    def lives(self, key: SequenceKey) -> bool:
        """The sequence is here and has not ended."""
        return key in self._desk.live

    @property
    def needs(self) -> PageNeeds:
        """What we ask the pager for with a prompt."""
        return self._desk.needs

    @property
    def idle(self) -> bool:
        """No sequence lives here, no page is held, nothing is owed."""
        desk = self._desk
        held = any(lease.hold is not Hold.OFFERED for lease in desk.leases.values())
        return not (desk.live or held or desk.debts or desk.step)

    @property
    def patience_ms(self) -> float:
        """How long the core can do without a ``Tick`` if no other event comes: briefly while a
        sequence or a debt waits for a retry, long when there is nothing to do."""
        desk, limits = self._desk, self._desk.limits
        waits = len(desk.live) > len(desk.running) or self._intake.draining
        waits = waits or bool(desk.debts or desk.expected)
        if waits or any(one.lease and one.lease.retry_ms > desk.now for one in desk.running):
            return limits.tick_ms
        beats = desk.live or any(line.beats_left for line in desk.lines.values())
        most_ms = limits.calm_tick_ms if beats else limits.idle_tick_ms
        return min(most_ms, max(self._session.patience_ms, limits.tick_ms))

    def handle(self, event: Event, now_ms: float) -> list[Command]:
        """``take`` and ``go_on`` in one call."""
        return [*self.take(event, now_ms), *self.go_on()]

    def take(self, event: Event, now_ms: float) -> list[Command]:
        """The immediate commands for ``event``. ``go_on`` has to follow, once other events that are
        already there were taken. ``now_ms`` is monotonic."""
        desk = self._desk
        desk.now = max(desk.now, now_ms)
        self._take(event)
        self._session.settle()
        leases.send_acks(desk)
        commands = desk.commands
        # Somebody waits for a first token. Other tokens are sent while the next step computes.
        waited_for = [line for line in desk.lines.values() if line.has_first]
        if waited_for:
            desk.commands = []
            frames.flush(desk, waited_for)
            # Pages are given back first: a client with its last frame may send the next turn.
            gives_back = any(
                isinstance(one, CallPager) and isinstance(one.message, Release) for one in commands
            )
            first = desk.commands
            commands = [*commands, *first] if gives_back else [*first, *commands]
        desk.commands = []
        return commands

    def go_on(self) -> list[Command]:
        """The commands that follow from all events taken: the next step and pending frames."""
        desk = self._desk
        self._batching.learn()
        steps.launch(desk, self._batching)
        frames.flush(desk, desk.lines.values())
        self._watch_drain()
        commands, desk.commands = desk.commands, []
        return commands

    def _take(self, event: Event) -> None:
        desk = self._desk
        match event:
            case StepsFinished():
                self._note(event)
                steps.finish(desk, event.results, goes_on=event.goes_on)
            case PagerAnswered() | PeerAnswered():
                desk.answered(event.call_id, event.message)
            case Received():
                self._received(event)
            case Tick():
                self._tick()
            case PagerChanged():
                self._session.changed(event.epoch)
            case PagerLost():
                self._session.silent()
            case PoolMissing():
                self._session.pool_missing(event.pool_incarnation)
            case GatewayLost():
                self._gateway_lost(event)
            case WorkerLost():
                desk.lose_worker(event.name)
            case Drain():
                self._intake.draining = True
                self._drain_until_ms = desk.now + event.grace_ms

    def _note(self, event: StepsFinished) -> None:
        self._batching.readers = event.readers
        step = self._desk.step
        if step is not None and not step.copies:
            own = [result for result in event.results if result.step == step.number]
            self._batching.note(step.rows, own)

    # Messages -------------------------------------------------------------------------------

    def _received(self, event: Received) -> None:
        try:
            answer = self._understood(event.message)
        except Fault as fault:
            answer = Refused.of(fault)
        if event.call is not None:
            self._desk.commands.append(Answer(event.call, answer))

    def _understood(self, message: Message) -> Message:
        """The answer. Raises ``Fault`` to refuse."""
        desk = self._desk
        match message:
            case Submit():
                answer, new = self._intake.submit(message)
                self._start(new, message)
                return answer
            case Attach():
                answer, new = self._intake.attach(message)
                self._start(new, message)
                return answer
            case Abort():
                return self._intake.abort(message)
            case Resend():
                return self._intake.resend(message)
            case Granted() | Queued() if desk.arrived(message.key, message):
                pass
            case Granted() | Extended():
                admission.heard_of(desk, message)
            case Refused():
                desk.give_up_expected(math.inf)
            case Queued():
                pass  # nobody waits for it any more
            case TicketClosed():
                handover.closed(desk, message)
            case InspectWorker():
                return report(desk)
            case Revoke():
                session.revoke(desk, message.lease, message.reason, message.usage)
            case _:
                raise Malformed(f"a worker does not accept {name_of(type(message))} messages")
        return Ok()

    def _start(self, new: list[Sequence], message: Submit | Attach) -> None:
        for sequence in new:
            if sequence.phase is Phase.WAITING and self._was_asked_for(sequence, message):
                admission.expect(self._desk, sequence)
            elif sequence.phase is Phase.WAITING:
                admission.ask(self._desk, sequence)
            elif sequence.phase is Phase.REDEEMING:
                handover.redeem(self._desk, sequence)

    def _was_asked_for(self, sequence: Sequence, message: Submit | Attach) -> bool:
        """Whether the gateway has asked for its pages, in the name of this incarnation and from
        the current incarnation of the pager. Pages that an earlier pager granted may belong to
        others by now, although the lease word in the pool still stands."""
        if not isinstance(message, Submit) or message.asked_as is None:
            return False
        desk, asked = self._desk, message.asked_as
        ours = (asked.incarnation, asked.epoch) == (desk.identity.incarnation, desk.epoch)
        return ours and sequence.key.choice == message.choices[0].choice

    # Time and loss --------------------------------------------------------------------------

    def _tick(self) -> None:
        desk, limits = self._desk, self._desk.limits
        self._session.tick()
        self._session.settle()
        draining_over = self._intake.draining and self._drain_until_ms <= desk.now
        is_away = self._session.away_ms >= limits.pager_wait_ms_max
        for sequence in list(desk.live.values()):
            if sequence.ended:
                continue
            if sequence.deadline_ms <= desk.now:
                ending.fail(desk, sequence, DeadlineExceeded("the deadline has passed"))
            elif draining_over:
                ending.fail(desk, sequence, Gone("the worker is shutting down"))
            elif is_away and (sequence.phase in _ASKING or steps.is_stuck(sequence)):
                ending.fail(desk, sequence, Busy("the pager is away"))
            else:
                self._nudge(sequence)
        desk.give_up_expected(desk.now)
        desk.pay()
        handover.forget_old_offers(desk)
        frames.beat(desk)
        self._intake.forget()

    def _nudge(self, sequence: Sequence) -> None:
        """Retry what the sequence waits for, if it is time."""
        match sequence.phase:
            case Phase.WAITING | Phase.ADMITTING:
                admission.ask(self._desk, sequence)
            case Phase.PREFILL | Phase.DECODE:
                admission.extend(self._desk, sequence)
            case Phase.OFFERING | Phase.OFFERED | Phase.WITHDRAWING | Phase.REDEEMING:
                handover.push(self._desk, sequence)
            case Phase.FORKING:
                # If a target's lease ends, its copy is never made, and no event says so.
                fork.settle(self._desk, [sequence])
            case _:
                pass

    def _gateway_lost(self, event: GatewayLost) -> None:
        desk = self._desk
        # Incarnations have no order: another one of the same name may wait for other sequences.
        lost = Owner(event.name, event.incarnation)
        for sequence in list(desk.live.values()):
            if sequence.owner == lost:
                ending.abort(desk, sequence)
        desk.lines.pop(lost, None)
        self._intake.lose(lost)

    def _watch_drain(self) -> None:
        if self._intake.draining and self.idle and not self._drained:
            self._drained = True
            self._desk.commands.append(Drained())

    # Checking -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises ``AssertionError`` when what the parts believe does not fit together."""
        desk = self._desk
        assert len(desk.live) <= desk.limits.sequences_max
        for key, sequence in desk.live.items():
            assert desk.sequences[key] is sequence and not sequence.ended, key
            sequence.check()
            if sequence.lease is not None:
                assert desk.leases[sequence.lease.lease] is sequence.lease, key
                assert sequence.lease.hold is Hold.HELD, (key, sequence.lease.hold)
        runnable = [one for one in desk.live.values() if one.phase in RUNNABLE]
        assert sorted(runnable, key=lambda one: one.order.place) == desk.running
        held = {id(one.lease) for one in desk.live.values() if one.lease is not None}
        stepping = {id(row.lease) for row in desk.step.rows} if desk.step else set()
        copying = desk.step.copies if desk.step else ()
        stepping |= {id(lease) for copy in copying for lease in (copy.source, copy.target)}
        for number, lease in desk.leases.items():
            lease.check()
            assert number == lease.lease
            assert lease.in_step == (id(lease) in stepping), number
            owned = id(lease) in held or lease.in_step or lease.ticket in desk.offers
            assert owned, (number, lease.hold, "belongs to nobody")
        for copy in desk.copies:
            assert copy.source.lease in desk.leases and copy.target.lease in desk.leases
        assert not desk.commands and not desk.acks
        for key, expected in desk.expected.items():
            call = desk.calls.get(expected.call_id)
            assert call is None or call.moves_leases, key
            assert expected.until_ms <= desk.now + desk.limits.expect_ms, key
