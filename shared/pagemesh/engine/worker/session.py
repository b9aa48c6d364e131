"""The session with the pager of this host, and what becomes of leases when either changes.

    CLOSED --OpenSession--> OPENING --SessionOpened--> OPEN --Refused, other epoch--> CLOSED

After every opening but the first, and when the pager asks, all leases are declared; those that
the pager cannot confirm are lost. A ``Declare`` is sent only while no call that moves leases is
open, and no such call is made before it is answered, so that it is never out of date. It says
that no other pages are used, so it also waits for a step that uses a lost lease. A long one is
sent in parts, each after the answer to the one before, so that the pager can serve others in
between. A part that is refused as malformed is sent in halves; a lease refused alone is lost.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

from pagemesh.engine.worker import admission, handover, leases
from pagemesh.engine.worker.desk import Desk
from pagemesh.engine.worker.events import UsePool
from pagemesh.engine.worker.lease import Hold, Lease
from pagemesh.engine.worker.sequence import Phase
from pagemesh.runtime.clock import to_multiple
from pagemesh.wire.messages import Message, Ok, Refused
from pagemesh.wire.pager_messages import (
    Declare,
    Declared,
    DeclareWanted,
    Heartbeat,
    HeldLease,
    OpenSession,
    SessionOpened,
)
from pagemesh.wire.tokens import pack, pack_extents

_LINE_BYTES = 576
"""Upper bound of what a declared lease takes in a message beside its tokens and pages."""


class _State(enum.Enum):
    CLOSED = "closed"
    OPENING = "opening"
    OPEN = "open"


class Session:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._state = _State.CLOSED
        self._opened: SessionOpened | None = None
        self._pool_incarnation = 0
        """Of the pool that is mapped; 0: none is."""
        self._retry_ms = 0.0
        self._retries = 0
        self._heartbeat_ms = 0.0
        self._away_since_ms: float | None = None
        """Since when presence has missed the pager; None: it is there."""
        self._shut_since_ms: float | None = None
        """Since when the last session has been over; None: there was none yet, or another is open
        and has our declaration."""
        self._beating = False
        self._declare_wanted = False
        self._declare_count = self._part_count = 0
        self._undeclared: deque[list[Lease]] = deque()
        """The leases of each part of the current declaration that is not answered yet, including
        the part that was sent."""

    @property
    def open(self) -> bool:
        return self._state is _State.OPEN

    @property
    def away_ms(self) -> float:
        """How long the pager has been missing, or has not opened a session or taken a declaration
        again."""
        now = self._desk.now
        since_ms = (self._away_since_ms, self._shut_since_ms)
        return now - min((at for at in since_ms if at is not None), default=now)

    @property
    def patience_ms(self) -> float:
        """How long the session can do without a tick: the time to the next heartbeat, or 0 while a
        tick has to open the session or declare leases."""
        if self._state is not _State.OPEN or self._declare_wanted or self._desk.session_doubted:
            return 0.0
        return math.inf if self._beating else self._heartbeat_ms - self._desk.now

    def changed(self, epoch: int) -> None:
        """The pager has announced itself under ``epoch``."""
        if self._opened is None or epoch != self._opened.epoch:
            self._close()
        self._away_since_ms = None
        self._retry_ms = self._heartbeat_ms = self._desk.now

    def silent(self) -> None:
        """The pager is silent: wait longer before the next try."""
        if self._away_since_ms is None:
            self._away_since_ms = self._desk.now
        self._retry_ms = max(self._retry_ms, self._desk.now + self._desk.limits.retry_ms_max)

    def pool_missing(self, pool_incarnation: int) -> None:
        """The pool that the pager named is not there: perhaps another was made since. Ask again,
        after a pause."""
        if pool_incarnation == self._pool_incarnation:
            self._pool_incarnation = 0
            self._close()
            self.settle()
            self._new_pool()
            self._retry_ms = self._desk.now + self._desk.limits.retry_ms_max

    def tick(self) -> None:
        desk = self._desk
        if desk.session_doubted:
            # Opening it again is harmless if nothing is wrong with it.
            desk.session_doubted = False
            self._close()
        if self._state is _State.CLOSED and self._retry_ms <= desk.now:
            self._open()
        elif self._state is _State.OPEN:
            if self._may_declare():
                self._declare()
            elif self._is_time_to_beat() and not self._beating:
                self._beat()

    def _is_time_to_beat(self) -> bool:
        """While a call that moves a lease is open, worker and pager may count different leases, and
        a heartbeat would look as if some were lost. It waits for such calls, but not for long."""
        desk = self._desk
        late_ms = desk.now + desk.limits.tick_ms / 2 - self._heartbeat_ms
        return late_ms >= (desk.limits.beat_late_ms_max if desk.leases_moving() else 0.0)

    def settle(self) -> None:
        desk = self._desk
        desk.may_ask = (
            self._state is _State.OPEN and not self._declare_wanted and not self._undeclared
        )

    # Opening --------------------------------------------------------------------------------

    def _close(self) -> None:
        if self._state is _State.OPEN:
            self._state = _State.CLOSED
            self._retry_ms = self._desk.now
            if self._shut_since_ms is None:
                self._shut_since_ms = self._desk.now

    def _open(self) -> None:
        identity = self._desk.identity
        self._state = _State.OPENING
        self._undeclared.clear()
        # It may be another pager, on another pool: calls to the last one are void, whoever
        # answers them.
        self._desk.give_up_pager_calls()
        self._desk.call_pager(
            OpenSession(
                worker=identity.name,
                incarnation=identity.incarnation,
                role=self._desk.role.role,
                model=identity.model,
                lock_name=identity.lock_name,
                pool=identity.pool,
            ),
            self._open_answered,
            moves_leases=False,
        )

    def _open_answered(self, message: Message) -> None:
        if self._state is not _State.OPENING:
            return
        if not isinstance(message, SessionOpened):
            self._state = _State.CLOSED
            wanted = message.retry_after_ms if isinstance(message, Refused) else 0
            self._retry_ms = self._desk.pause(self._retries, wanted)
            self._retries += 1
            return
        before, desk = self._opened, self._desk
        self._state, self._opened, self._retries = _State.OPEN, message, 0
        self._away_since_ms = None
        if before is None:  # else it may not ask for pages until it has declared
            self._shut_since_ms = None
        self._heartbeat_ms = self._next_beat_ms(message)
        self._beating = False
        desk.epoch, desk.pool_pages = message.epoch, message.page_count
        self._declare_wanted = before is not None
        if self._pool_incarnation != message.pool_incarnation:
            self._pool_incarnation = message.pool_incarnation
            self._new_pool()
            desk.commands.append(UsePool(message))

    def _new_pool(self) -> None:
        """The pool was made anew, so all leases are lost."""
        for lease in list(self._desk.leases.values()):
            _lose(self._desk, lease)

    # Heartbeats -----------------------------------------------------------------------------

    def _beat(self) -> None:
        assert self._opened is not None
        desk = self._desk
        held = [lease.lease for lease in desk.leases.values() if lease.hold is Hold.HELD]
        digest = 0
        for lease in held:
            digest ^= lease
        self._beating = True
        self._heartbeat_ms = self._next_beat_ms(self._opened)
        desk.call_pager(
            Heartbeat(
                worker=desk.identity.name,
                incarnation=desk.identity.incarnation,
                epoch=self._opened.epoch,
                lease_count=len(held),
                lease_digest=digest,
            ),
            partial(self._beat_answered, self._opened),
            moves_leases=False,
        )

    def _next_beat_ms(self, opened: SessionOpened) -> float:
        """When all workers of the host send their next heartbeat, so that they wake together."""
        now = self._desk.now
        return now + to_multiple(now, max(opened.heartbeat_ms, 1))

    def _beat_answered(self, opened: SessionOpened, message: Message) -> None:
        if opened is not self._opened or self._state is not _State.OPEN:
            return
        self._beating = False
        match message:
            case Ok():
                self._away_since_ms = None
            case DeclareWanted():
                self._declare_wanted = not self._undeclared  # else the other parts are to come
            case Refused(code="Stale" | "Gone" | "Denied"):
                self._close()
            case _:
                self._heartbeat_ms = min(self._heartbeat_ms, self._desk.pause(1))

    # Declaring ------------------------------------------------------------------------------

    def _may_declare(self) -> bool:
        """Whether a declaration is wanted and would be accurate. It does not name lost leases, so
        the pager may give their pages away: no step may still use them. Nor may there be pending
        copies, since the tails to be copied already count as filled."""
        desk = self._desk
        lost = any(lease.hold is Hold.LOST for lease in desk.leases.values())
        wanted = self._declare_wanted and not self._undeclared
        return wanted and not lost and not desk.copies and not desk.leases_moving()

    def _declare(self) -> None:
        desk = self._desk
        self._declare_wanted = False
        self._declare_count += 1
        for sequence in desk.live.values():
            # A lease granted before this declaration, which does not name it, may be taken back
            # or may stand. So a queued sequence takes its grant for a hint and asks again.
            if sequence.phase is Phase.ADMITTING:
                desk.move(sequence, Phase.WAITING)
        for lease in desk.leases.values():
            # A restarted pager knows no more tokens than are declared.
            lease.known = min(lease.known, lease.filled)
        self._undeclared.extend(_parts(desk.leases.values(), desk.limits.declare_bytes_max))
        self._part_count = len(self._undeclared)
        self._declare_part()

    def _declare_part(self) -> None:
        """Declare the leases of the next part, except those given back meanwhile."""
        assert self._opened is not None
        desk = self._desk
        desk.call_pager(
            Declare(
                worker=desk.identity.name,
                incarnation=desk.identity.incarnation,
                epoch=self._opened.epoch,
                number=self._declare_count,
                part=self._part_count - len(self._undeclared),
                parts=self._part_count,
                leases=[_held(lease) for lease in self._there(self._undeclared[0])],
            ),
            partial(self._declare_answered, self._opened),
            moves_leases=True,
        )

    def _there(self, part: list[Lease]) -> list[Lease]:
        return [one for one in part if self._desk.leases.get(one.lease) is one]

    def _declare_answered(self, opened: SessionOpened, message: Message) -> None:
        if opened is not self._opened or not self._undeclared:
            return
        part = self._undeclared.popleft()
        match message:
            case Declared():
                self._shut_since_ms = None
                self._undeclared.clear()
                for number in message.lost:
                    lease = self._desk.leases.get(number)
                    if lease is not None:
                        _lose(self._desk, lease)
            case Ok() if self._undeclared:
                self._declare_part()
            case Refused(code="Stale" | "Gone" | "Denied"):
                self._give_up_declaring()
                self._close()
            case Refused(code="Malformed"):
                self._declare_less(self._there(part))
            case _:
                self._give_up_declaring()

    def _declare_less(self, part: list[Lease]) -> None:
        """``part`` is too large for the bus, or the pager cannot take one of its leases, and that
        will not change: declare it in halves. A lease that cannot be declared alone is lost."""
        if len(part) > 1:
            half = len(part) // 2
            self._undeclared.extendleft((part[half:], part[:half]))
            self._part_count += 1
            self._declare_part()
            return
        for lease in part:
            _lose(self._desk, lease)
        self._give_up_declaring()  # to go on would say that no step uses the lost lease

    def _give_up_declaring(self) -> None:
        """Start over once a declaration is possible."""
        self._undeclared.clear()
        self._declare_wanted = True


def _parts(held: Iterable[Lease], bytes_max: int) -> Iterator[list[Lease]]:
    """``held``, in lists that fit into a message each; yields at least one."""
    part: list[Lease] = []
    room = bytes_max
    for lease in held:
        size = 4 * lease.filled + 8 * lease.page_count + _LINE_BYTES
        if part and size > room:
            yield part
            part, room = [], bytes_max
        part.append(lease)
        room -= size
    yield part


def _held(lease: Lease) -> HeldLease:
    return HeldLease(
        lease=lease.lease,
        lease_slot=lease.slot,
        key=lease.key,
        order=lease.order,
        root=lease.root,
        granted_at=lease.granted_at,
        extents=pack_extents(lease.table),
        tokens=pack(lease.tokens.view(0, lease.filled)),
        terms=lease.terms,
        promised_pages=lease.promised_pages,
        tokens_max=lease.tokens_max,
        ticket=lease.ticket,
    )


def _lose(desk: Desk, lease: Lease) -> None:
    if lease.hold is Hold.OFFERED:
        handover.taken_back(desk, lease)
    elif lease.hold is not Hold.LOST:
        admission.revoked(desk, lease, "stale")


def revoke(desk: Desk, number: int, reason: str, usage: str) -> None:
    """The pager ended a lease. Acknowledge that, but not before a step that uses it has ended."""
    lease = desk.leases.get(number)
    if lease is None:
        leases.acknowledge_unknown(desk, number)
    elif lease.hold is Hold.OFFERED:
        handover.taken_back(desk, lease)
    elif lease.hold is not Hold.LOST:
        admission.revoked(desk, lease, reason, usage)
