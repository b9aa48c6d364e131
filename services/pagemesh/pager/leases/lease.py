"""The lifecycles of leases, tickets and sessions.

    lease     HELD <----> OFFERED         held by a session, or on its way by a ticket
               |  `-----.    |
               v         v   v
            REVOKED ---> ENDED            REVOKED: its pages drain until the holder lets go

    ticket    OFFERED --> REDEEMED | CANCELLED | EXPIRED

    session   OPEN <----> EXPIRED         open again only by OpenSession, without its leases
               |  ^          |
               v  |          v
              DEAD <------ (any)
            SILENT --> OPEN | DEAD        SILENT: known from an earlier pager life only

An illegal move raises ``IllegalMove`` with the history of the thing that was moved.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, TypeVar

import msgspec

from pagemesh.pager.pages.runs import Pages, follows, join, join_all, join_extents, pack_runs
from pagemesh.pager.tree.accounts import Account
from pagemesh.pager.tree.radix import Node, Tree
from pagemesh.wire.messages import Order, SequenceKey
from pagemesh.wire.pager_messages import Granted, Handle, Waterfall
from pagemesh.wire.tokens import EMPTY, U32, PageCopy, unpack_extents

_HISTORY_MAX = 32
RevokeReason = Literal["preempted", "session_expired", "ticket_expired", "stale"]


class IllegalMove(AssertionError):
    """A lifecycle was asked for a move that its table does not have: a bug in the pager."""


class LeaseState(enum.Enum):
    HELD = "held"
    OFFERED = "offered"
    REVOKED = "revoked"
    ENDED = "ended"

    __hash__ = object.__hash__  # members are single, and Enum's own is a call in Python


class TicketState(enum.Enum):
    OFFERED = "offered"
    REDEEMED = "redeemed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class SessionState(enum.Enum):
    SILENT = "silent"
    OPEN = "open"
    EXPIRED = "expired"
    DEAD = "dead"


LEASE_MOVES: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.HELD: frozenset({LeaseState.OFFERED, LeaseState.REVOKED, LeaseState.ENDED}),
    LeaseState.OFFERED: frozenset({LeaseState.HELD, LeaseState.ENDED}),
    LeaseState.REVOKED: frozenset({LeaseState.ENDED}),
    LeaseState.ENDED: frozenset(),
}
TICKET_MOVES: dict[TicketState, frozenset[TicketState]] = {
    TicketState.OFFERED: frozenset(
        {TicketState.REDEEMED, TicketState.CANCELLED, TicketState.EXPIRED}
    ),
    TicketState.REDEEMED: frozenset(),
    TicketState.CANCELLED: frozenset(),
    TicketState.EXPIRED: frozenset(),
}
SESSION_MOVES: dict[SessionState, frozenset[SessionState]] = {
    SessionState.SILENT: frozenset({SessionState.OPEN, SessionState.DEAD}),
    SessionState.OPEN: frozenset({SessionState.EXPIRED, SessionState.DEAD}),
    SessionState.EXPIRED: frozenset({SessionState.OPEN, SessionState.DEAD}),
    SessionState.DEAD: frozenset(),
}

S = TypeVar("S", LeaseState, TicketState, SessionState)


class Lifecycle(msgspec.Struct, Generic[S], eq=False, gc=False):
    """A state that moves by a table, and remembers why, and how it came there."""

    _moves: dict[S, frozenset[S]]
    state: S
    _why: str
    _past: tuple[tuple[S, str], ...] = ()

    def move(self, target: S, why: str) -> None:
        """Go to ``target``. Raises ``IllegalMove`` when the table does not have it."""
        if target not in self._moves[self.state]:
            told = "; ".join(f"{state.value} by {reason}" for state, reason in self.history)
            raise IllegalMove(f"{self.state.value} -> {target.value} by {why}, after {told}")
        before: tuple[tuple[S, str], ...] = self._past
        latest: tuple[tuple[S, str], ...] = ((self.state, self._why),)
        if len(before) >= _HISTORY_MAX - 1:
            before = before[:1] + before[2:]
        self._past, self.state, self._why = before + latest, target, why

    @property
    def history(self) -> tuple[tuple[S, str], ...]:
        before: tuple[tuple[S, str], ...] = self._past
        latest: tuple[tuple[S, str], ...] = ((self.state, self._why),)
        return before + latest


class Lease(msgspec.Struct, eq=False, gc=False):
    """A right to pages. This is its page table, which ``extents`` holds packed:

        [ shared, or a private copy of what the tree has | writable ]
          0 ........................... committed_pages ... page_count

    ``anchor`` is where in the tree the first ``committed_pages`` pages of tokens end, and is
    pinned. Page tables never change mid-sequence: where another lease had committed the same
    content first, our own page stays in the table, still held, and is listed in ``copies``.
    Nothing that a lease refers to refers to it (``gc``).
    """

    id: int
    slot: int
    key: SequenceKey
    order: Order
    incarnation: int
    """The writer of its held pages: the holder, or while offered the offerer."""
    tree: Tree
    anchor: Node
    extents: bytes
    page_count: int
    writable: list[Pages]
    """As it was granted, part by part: each mostly a run."""
    granted_at: int
    tokens: bytes
    """Packed ids of what is known from position ``tokens_first`` on, which is a page's first
    and not beyond the committed ones: what is committed is cut off now and then, not each time,
    so that a long prompt is not copied with each of its chunks."""
    tokens_first: int
    matched_pages: int
    """Cached when the lease was granted, so not of its own making."""
    cached_tokens: int
    """Slots filled when it was granted to its present holder."""
    waterfall: Waterfall
    granted_ms: int
    tokens_max: int = 0
    """Slots that it may ever fill."""
    ttl_ms: int = 0
    """How long what it uses is cached after it ended; 0: for as long as there is room."""
    life: Lifecycle[LeaseState] = msgspec.field(
        default_factory=partial(Lifecycle, LEASE_MOVES, LeaseState.HELD, "grant")
    )
    copies: list[Pages] = msgspec.field(default_factory=list)
    promised_pages: int = 0
    """More that it gets when it asks (``promises``)."""
    filled_tokens: int = 0
    forked_from: int = 0
    copied: tuple[PageCopy, ...] = ()
    """What the worker copies when it forks this lease off."""
    made: bool = False
    """The lease made the edge it is anchored at, and may lengthen it."""
    prompt_pages: int = 0
    """Full pages of what was asked for, while it fills them and others may wait for them."""
    trace: str = ""
    """The trace of who was admitted; empty: none, or of an earlier life of the pager."""
    place: tuple[Node, bytes] | None = None
    """Where it is registered as filling them (``in_flight``): its anchor, and its next page."""
    ticket: str = ""
    revoked_ms: int = 0
    notified_ms: int = 0
    reason: RevokeReason = "stale"

    @property
    def committed_pages(self) -> int:
        return self.anchor.depth

    @property
    def account(self) -> Account:
        """Whose quota its pages count against."""
        return self.tree.root.account

    @property
    def may_fill(self) -> bool:
        """Its holder may commit more."""
        return self.life.state is LeaseState.HELD

    @property
    def known_tokens(self) -> int:
        """Token ids known, from the start."""
        return self.tokens_first + len(self.tokens) // 4

    @property
    def held_pages(self) -> Pages:
        """Pages that this lease alone holds: copies, then the writable ones."""
        parts = [*self.copies, *self.writable] if self.copies else self.writable
        return parts[0] if len(parts) == 1 else join_all(parts)

    @property
    def table(self) -> U32:
        """The page table, page by page."""
        return unpack_extents(self.extents, page_count_max=self.page_count)

    def known_from(self, position: int) -> bytes:
        """Packed ids of what is known from ``position`` on; that is not before ``tokens_first``."""
        return self.tokens[4 * (position - self.tokens_first) :]

    def granted(self) -> Granted:
        """The lease as it stands; on a repeat what the first answer said, or more pages."""
        return Granted(
            key=self.key,
            lease=self.id,
            lease_slot=self.slot,
            granted_at=self.granted_at,
            extents=self.extents,
            cached_tokens=self.cached_tokens,
            waterfall=self.waterfall,
        )

    def grow(self, fresh: list[Pages]) -> bytes:
        """Add writable pages at the end. Returns them packed."""
        packed, parts = pack_runs(fresh), self.writable
        self.extents = join_extents(self.extents, packed)
        for pages in fresh:
            self.page_count += len(pages)
            if parts and follows(parts[-1], pages):
                parts[-1] = join(parts[-1], pages)
            else:
                parts.append(pages)
        return packed

    def take_written(self, count: int) -> Pages:
        """Cut off the first ``count`` writable pages; there are so many."""
        parts, taken = self.writable, []
        while count:
            part = parts[0]
            if len(part) > count:
                parts[0] = part[count:]
                part = part[:count]
            else:
                del parts[0]
            taken.append(part)
            count -= len(part)
        return taken[0] if len(taken) == 1 else join_all(taken)

    def forget(self) -> None:
        """It is over: let go of what only memory is kept alive by (a closed ticket is remembered
        for long, and the lease with it)."""
        self.anchor, self.writable, self.copies = self.tree.root, [], []
        self.extents, self.page_count, self.tokens, self.copied = b"", 0, b"", ()


@dataclass(slots=True, eq=False)
class Ticket:
    """A lease on its way; ``handle`` is what was offered."""

    id: str
    lease: Lease
    offerer: int
    handle: Handle
    expires_ms: int
    redeemer: int = 0
    withdrawn: bool = False
    life: Lifecycle[TicketState] = field(
        default_factory=partial(Lifecycle, TICKET_MOVES, TicketState.OFFERED, "offer")
    )


@dataclass(slots=True, eq=False)
class Declaration:
    """What a worker says that it holds, as far as it has come."""

    number: int
    since_ms: int
    """When its first part came."""
    parts: set[int] = field(default_factory=set)
    """Those that were taken up."""
    named: set[int] = field(default_factory=set)
    """Their leases."""
    lost: list[int] = field(default_factory=list)
    """Those of them that the worker is to forget."""
    line_count: int = 0
    """Leases in these parts; one may be named twice."""


@dataclass(slots=True, eq=False)
class Session:
    """One worker incarnation.

    ``leases``: those it holds or still has to let go of; ``by_key``: those it holds;
    ``claimed``: draining pages of an earlier pager life that only it could write.
    """

    incarnation: int
    worker: str
    lock_name: str
    expires_ms: int
    life: Lifecycle[SessionState]
    model: str = ""
    """What its worker serves."""
    leases: dict[int, Lease] = field(default_factory=dict)
    by_key: dict[SequenceKey, Lease] = field(default_factory=dict)
    claimed: U32 = field(default_factory=lambda: EMPTY)
    letting_go: dict[int, U32] = field(default_factory=dict)
    """Draining pages of leases that a declaration named and that are lost."""
    declaring: Declaration | None = None
    """The last declaration that was begun, while it is not complete."""
    declared_number: int = 0
    """The last declaration that was complete."""
    mismatch_count: int = 0
    probed_ms: int = 0
    since_ms: int = 0
    """When it came to its present state."""

    @property
    def is_open(self) -> bool:
        return self.life.state is SessionState.OPEN

    @property
    def is_empty(self) -> bool:
        """Nothing of the pool is in its hands."""
        return not self.leases and not len(self.claimed) and not self.letting_go
