"""State that the parts of a worker's core share: the sequences, the leases, the open calls,
what is owed to the pager, and the commands of the current event.

Each part is a module of functions over one ``Desk``:

    intake     messages of gateways and peers      admission  pages: ask, extend, commit
    steps      plans and their results             fork       one prompt, several choices
    handover   tickets, from either side           leases     taking and giving back
    session    the session with the pager          ending     every way a sequence ends
    frames     what is sent to gateways
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pagemesh.engine.worker.ahead import first_part
from pagemesh.engine.worker.events import Call, CallId, CallPager, CallWorker, Command
from pagemesh.engine.worker.lease import Copy, Lease
from pagemesh.engine.worker.sequence import RUNNABLE, Owner, Phase, Sequence
from pagemesh.engine.worker.settings import RoleSettings, WorkerIdentity, WorkerLimits
from pagemesh.wire.messages import Message, OrderPlace, Refused, SequenceKey
from pagemesh.wire.presence import PageNeeds
from pagemesh.wire.work_messages import Frame

Handler = Callable[[Message], None]

_UNANSWERED = frozenset({"DeadlineExceeded", "Disconnected", "Absent", "Busy"})


def unanswered(message: Refused) -> bool:
    """Whether to ask again: the call may or may not have been done, or could not be done now."""
    return message.code in _UNANSWERED


@dataclass(frozen=True, slots=True)
class Open:
    """A call that has not been answered yet."""

    handler: Handler
    to_pager: bool
    moves_leases: bool
    """Its reply can grant, end or extend a lease, so no ``Declare`` is sent while it is open."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The answer to a call that a gateway has made in our name."""

    call_id: CallId
    until_ms: float


@dataclass(slots=True)
class Debt:
    """A message that the pager must get: sent again until it is answered."""

    message: Message
    otherwise: Message | None
    """Owed in its place when the pager refuses it."""
    lease: int | None
    """The lease that it gives back. A grant of that lease is void while this is owed."""
    retry_ms: float = 0.0
    retries: int = 0
    calling: bool = False


@dataclass(slots=True)
class Line:
    """The frames for one gateway incarnation."""

    owner: Owner
    counter: int = 0
    frames: list[Frame] = field(default_factory=list)
    last_ms: float = 0.0
    live_count: int = 0
    beats_left: int = 0

    @property
    def has_first(self) -> bool:
        """Whether the frames to be sent include the first one of a sequence."""
        return any(frame.waterfall is not None for frame in self.frames)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the running step: ``count`` tokens of ``sequence`` in ``lease``."""

    sequence: Sequence
    lease: Lease
    count: int
    draws: bool
    """As of the start of the step: its sequence may have ended since."""
    followers: tuple[Sequence, ...]
    beam_count: int = 0
    """Not 0: it stands for this many rows of the plan, one for each beam of a search."""


@dataclass(slots=True)
class Step:
    """The running plan: one step, or the steps of a run."""

    number: int
    rows: tuple[Row, ...]
    copies: tuple[Copy, ...]
    may_repeat: bool
    """Further steps may follow without asking the scheduler."""
    passed: frozenset[Sequence]
    """Sequences passed over because others have all of its rows."""


@dataclass(frozen=True, slots=True)
class Offer:
    """An offered lease whose ticket is not known to be closed."""

    sequence: Sequence
    lease: Lease


def _place(sequence: Sequence) -> OrderPlace:
    return sequence.order.place


class Desk:
    def __init__(
        self,
        identity: WorkerIdentity,
        role: RoleSettings,
        limits: WorkerLimits,
        make_ticket: Callable[[], str],
    ) -> None:
        self.identity = identity
        self.role = role
        self.limits = limits
        self.make_ticket = make_ticket
        self.page_size = identity.pool.page_size
        self.needs = PageNeeds(
            growth_tokens=limits.growth_pages * self.page_size,
            first_tokens=first_part(role.chunk_tokens_max, limits.prompt_chunks),
        )
        self.now = 0.0
        self.commands: list[Command] = []
        self.sequences: dict[SequenceKey, Sequence] = {}
        """Live ones and, for a while, ended ones."""
        self.ended: deque[Sequence] = deque()
        """The ended ones, oldest first."""
        self.live: dict[SequenceKey, Sequence] = {}
        self.latest: dict[tuple[str, int], Sequence] = {}
        """The highest attempt at each (request, choice)."""
        self.running: list[Sequence] = []
        """Those in PREFILL or DECODE, by ``order``."""
        self.leases: dict[int, Lease] = {}
        self.offers: dict[str, Offer] = {}
        self.copies: list[Copy] = []
        """To be done in the next step."""
        self.step: Step | None = None
        self.steps_count = 0
        self.calls: dict[CallId, Open] = {}
        self.next_call = 1
        self.expected: dict[SequenceKey, Expected] = {}
        self.debts: dict[int, Debt] = {}
        self.next_debt = 1
        self.acks: list[int] = []
        """Leases to acknowledge at the end of this event."""
        self.dead: dict[int, CallId] = {}
        """Leases that ended, with the number of the next call at that time. They are kept until
        all calls open at that time are answered: a grant on its way may name them."""
        self.lines: dict[Owner, Line] = {}
        self.lost_workers: dict[str, None] = {}
        """Kept until a ``Submit`` names them again; the longest lost first."""
        self.may_ask = False
        """The session is open and nothing is being declared."""
        self.session_doubted = False
        """A reply suggests that the pager does not know our session."""
        self.epoch = 0
        self.pool_pages = 0

    # Calls ----------------------------------------------------------------------------------

    def call_pager(self, message: Message, handler: Handler, *, moves_leases: bool) -> None:
        call_id = self._open(Open(handler, to_pager=True, moves_leases=moves_leases))
        self.commands.append(CallPager(call_id, message, self.limits.call_ms))

    def expect(self, key: SequenceKey, handler: Handler) -> None:
        """Treat the pager's next message about the pages of ``key`` as the answer to a call of ours
        that may bring a lease. If none comes in time, the call counts as unanswered."""
        assert key not in self.expected, "an answer is expected already"
        call_id = self._open(Open(handler, to_pager=True, moves_leases=True))
        self.expected[key] = Expected(call_id, self.now + self.limits.expect_ms)

    def arrived(self, key: SequenceKey, message: Message) -> bool:
        """Pass ``message`` to the handler that expects it. Returns whether there was one."""
        expected = self.expected.pop(key, None)
        if expected is None or expected.call_id not in self.calls:
            return False
        self.answered(expected.call_id, message)
        return True

    def give_up_expected(self, until_ms: float) -> None:
        """Stop waiting for what was expected by ``until_ms``: a message was lost, the pager is
        busy, or it refused one of the admissions, and a refusal does not say which."""
        late = Refused(code="DeadlineExceeded", message="the pager granted nothing in time")
        for key, expected in list(self.expected.items()):
            if expected.until_ms <= until_ms:
                self.arrived(key, late)

    def call_worker(self, worker: str, message: Message, handler: Handler) -> None:
        call_id = self._open(Open(handler, to_pager=False, moves_leases=False))
        self.commands.append(CallWorker(worker, call_id, message, self.limits.call_ms))

    def _open(self, call: Open) -> Call:
        call_id = self.next_call
        self.next_call += 1
        self.calls[call_id] = call
        return call_id

    def answered(self, call_id: CallId, message: Message) -> None:
        """Pass an answer to the handler of its call; that of a call given up is ignored."""
        call = self.calls.pop(call_id, None)
        if call is not None:
            call.handler(message)
        self._forget_dead()

    def give_up_pager_calls(self) -> None:
        """Treat every open call to the pager as unanswered: it may have been replaced."""
        given_up = Refused(code="Disconnected", message="the pager was replaced")
        for call_id in [call_id for call_id, call in self.calls.items() if call.to_pager]:
            self.answered(call_id, given_up)

    def leases_moving(self) -> bool:
        return any(call.moves_leases for call in self.calls.values())

    def _forget_dead(self) -> None:
        if self.dead:
            oldest = min(self.calls, default=self.next_call)
            self.dead = {lease: until for lease, until in self.dead.items() if until > oldest}

    def pause(self, retries: int, wanted_ms: int = 0) -> float:
        """When to try again after ``retries`` earlier retries: exponential back-off, bounded."""
        wait = self.limits.retry_ms << min(retries, 16)
        return self.now + min(max(wait, wanted_ms), max(self.limits.retry_ms_max, wanted_ms))

    # Debts ----------------------------------------------------------------------------------

    def owe(
        self, message: Message, *, lease: int | None = None, otherwise: Message | None = None
    ) -> None:
        self.debts[self.next_debt] = Debt(message, otherwise, lease)
        self._send_debt(self.next_debt)
        self.next_debt += 1

    def lets_go(self, lease: int) -> bool:
        """Whether something that is owed gives ``lease`` back."""
        return any(debt.lease == lease for debt in self.debts.values())

    def pay(self) -> None:
        """Send again what is owed and was not answered, if it is time."""
        for number, debt in list(self.debts.items()):
            if not debt.calling and debt.retry_ms <= self.now:
                self._send_debt(number)

    def _send_debt(self, number: int) -> None:
        debt = self.debts[number]
        debt.calling = True

        def answered(message: Message) -> None:
            debt.calling = False
            if not isinstance(message, Refused):
                del self.debts[number]
            elif unanswered(message):
                debt.retry_ms = self.pause(debt.retries)
                debt.retries += 1
            else:
                del self.debts[number]
                if debt.otherwise is not None:
                    self.owe(debt.otherwise, lease=debt.lease)

        self.call_pager(debt.message, answered, moves_leases=False)

    # Sequences ------------------------------------------------------------------------------

    def move(self, sequence: Sequence, phase: Phase) -> None:
        """Change a sequence's phase, and with it its place among the running."""
        was_runnable = sequence.phase in RUNNABLE
        sequence.move(phase)
        if phase in RUNNABLE and not was_runnable:
            insort(self.running, sequence, key=_place)
        elif was_runnable and phase not in RUNNABLE:
            index = bisect_left(self.running, sequence.order.place, key=_place)
            while self.running[index] is not sequence:
                index += 1
            del self.running[index]
        if sequence.ended:
            sequence.ended_ms = max(self.now, 0.001)
            self.ended.append(sequence)
            del self.live[sequence.key]
            line = self.lines[sequence.owner]
            line.live_count -= 1
            line.beats_left = self.limits.beats_max

    def lose_worker(self, name: str) -> None:
        """Hand nothing over to that worker until a ``Submit`` names it again."""
        self.lost_workers[name] = None
        if len(self.lost_workers) > self.limits.workers_max:
            del self.lost_workers[next(iter(self.lost_workers))]

    def line(self, owner: Owner) -> Line:
        """The line of a gateway incarnation. If it is new and there are too many, the oldest
        one that waits for nothing is dropped."""
        line = self.lines.get(owner)
        if line is None:
            if len(self.lines) >= self.limits.gateways_max:
                self._forget_line()
            line = self.lines[owner] = Line(owner, last_ms=self.now)
        return line

    def _forget_line(self) -> None:
        for owner, line in self.lines.items():
            if not line.live_count and not line.frames:
                del self.lines[owner]
                return

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.key] = sequence
        self.live[sequence.key] = sequence
        self.latest[(sequence.key.request, sequence.key.choice)] = sequence
        self.line(sequence.owner).live_count += 1
