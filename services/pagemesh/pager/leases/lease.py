"""Leases, tickets and sessions, each with its lifecycle (``states``).

These are plain classes: once compiled, their attributes lie at fixed offsets, and every message
reads some twenty of them.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from pagemesh.pager.leases.states import (
    LEASE_MOVES,
    TICKET_MOVES,
    IllegalMove,
    LeaseState,
    RevokeReason,
    SessionState,
    TicketState,
)
from pagemesh.pager.pages.runs import (
    NO_PAGES,
    Pages,
    follows,
    join,
    join_all,
    join_extents,
    last_extents,
    pack_runs,
    part,
)
from pagemesh.pager.tree.accounts import Account
from pagemesh.pager.tree.radix import Node, Tree
from pagemesh.wire.messages import Order, SequenceKey
from pagemesh.wire.pager_messages import Extend, Extended, Granted, Handle, Waterfall
from pagemesh.wire.tokens import EMPTY, U32, PageCopy, unpack_extents

_HISTORY_MAX = 32
NO_WATERFALL: Final = Waterfall()
# Enum members, looked up once: each lookup would take longer than a call.
_HELD: Final = LeaseState.HELD
_OFFERED: Final = TicketState.OFFERED
_OPEN: Final = SessionState.OPEN
NO_TREE: Final = Tree(0, b"", Node(None, b"", NO_PAGES))
"""That of ended leases, and of a root that has none yet; nothing matches in it."""

S = TypeVar("S", LeaseState, TicketState, SessionState)


class Lifecycle(Generic[S]):
    """A state machine: the allowed moves are a table, and the history is kept with reasons."""

    __slots__ = ("_moves", "_past", "_why", "state")

    def __init__(self, moves: dict[S, frozenset[S]], state: S, why: str) -> None:
        self._moves: dict[S, frozenset[S]] = moves
        self.state: S = state
        self._why = why
        self._past: tuple[tuple[S, str], ...] = ()

    def move(self, target: S, why: str) -> None:
        """Go to ``target``. Raises ``IllegalMove`` when the table does not allow it."""
        if target not in self._moves[self.state]:
            told = "; ".join(f"{state.value} by {reason}" for state, reason in self.history)
            raise IllegalMove(f"{self.state.value} -> {target.value} by {why}, after {told}")
        before = self._past
        latest: tuple[tuple[S, str], ...] = ((self.state, self._why),)
        if len(before) >= _HISTORY_MAX - 1:
            before = before[:1] + before[2:]
        self._past, self.state, self._why = before + latest, target, why

    @property
    def history(self) -> tuple[tuple[S, str], ...]:
        latest: tuple[tuple[S, str], ...] = ((self.state, self._why),)
        return self._past + latest


class Lease:
    """A right to pages. ``extents`` holds its page table, packed:

        [ shared, or a private copy of what the tree has | writable ]
          0 ........................... committed_pages ... page_count

    ``anchor`` is the tree node where the first ``committed_pages`` pages of tokens end; it is
    pinned. Page tables never change mid-sequence: if another lease committed the same content
    first, this lease's own page stays in the table, still held, and is listed in ``copies``.
    """

    __slots__ = (
        "anchor", "cached_tokens", "copied", "copies", "extents", "filled_tokens", "forked_from",
        "granted_at", "granted_ms", "id", "incarnation", "key", "life", "made", "matched_pages",
        "notified_ms", "order", "page_count", "place", "promised_pages", "prompt_pages", "reason",
        "revoked_ms", "slot", "ticket", "tokens", "tokens_first", "tokens_max", "trace", "tree",
        "ttl_ms", "waterfall", "writable",
    )  # fmt: skip

    def __init__(
        self,
        *,
        id: int,
        slot: int,
        key: SequenceKey,
        order: Order,
        tree: Tree,
        anchor: Node,
        extents: bytes,
        page_count: int,
        writable: list[Pages],
        granted_at: int,
        granted_ms: int,
    ) -> None:
        self.id, self.slot = id, slot
        self.key, self.order = key, order
        self.incarnation = 0
        """The writer of its held pages: the holder, or the offerer while the lease is offered."""
        self.tree, self.anchor = tree, anchor
        self.extents, self.page_count = extents, page_count
        self.writable = writable
        """The writable pages in the parts in which they were granted, most of them runs."""
        self.granted_at, self.granted_ms = granted_at, granted_ms
        self.tokens = b""
        self.tokens_first = 0
        """Packed ids of the known tokens from position ``tokens_first`` on. That position starts
        a page and is at most the end of the committed pages: committed tokens are dropped now and
        then, not with every commit, so that a long prompt is not copied with each of its chunks."""
        self.matched_pages = anchor.depth
        """Pages that were cached when the lease was granted, so it did not compute them."""
        self.cached_tokens = self.filled_tokens = 0
        """Slots filled when the lease was granted to its present holder, and slots filled now."""
        self.waterfall = NO_WATERFALL
        self.tokens_max = 0
        """Slots that it may ever fill."""
        self.ttl_ms = 0
        """How long its pages stay cached after it ends; 0: for as long as there is room."""
        self.trace = ""
        """The trace of its sequence; empty: none."""
        self.life: Lifecycle[LeaseState] = Lifecycle(LEASE_MOVES, _HELD, "grant")
        self.copies: list[Pages] = []
        self.promised_pages = 0
        """Further pages that it gets when it asks (``promises``)."""
        self.forked_from = 0
        self.copied: tuple[PageCopy, ...] = ()
        """Page copies that the worker makes when it forks this lease off."""
        self.made = False
        """The lease created the edge it is anchored at, and may lengthen it."""
        self.prompt_pages = 0
        """Full pages of the prompt, while it fills them and others may wait for them; else 0."""
        self.place: tuple[Node, bytes] | None = None
        """Where it is registered as filling (``in_flight``): its anchor, and its next page."""
        self.ticket = ""
        self.revoked_ms = self.notified_ms = 0
        self.reason: RevokeReason = "stale"

    @property
    def committed_pages(self) -> int:
        return self.anchor.depth

    @property
    def account(self) -> Account:
        """The account whose quota its pages count against."""
        return self.tree.root.account

    @property
    def may_fill(self) -> bool:
        """Whether its holder may commit more."""
        return self.life.state is _HELD

    @property
    def known_tokens(self) -> int:
        """Number of known token ids, from the start of the sequence."""
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
        """Packed ids of the known tokens from ``position`` on; at least ``tokens_first``."""
        return self.tokens[4 * (position - self.tokens_first) :]

    def granted(self) -> Granted:
        """The reply that describes the lease now. Repeated, it says the same or has more pages."""
        return Granted(
            key=self.key,
            lease=self.id,
            lease_slot=self.slot,
            granted_at=self.granted_at,
            extents=self.extents,
            cached_tokens=self.cached_tokens,
            waterfall=self.waterfall,
        )

    def extended(self, message: Extend, fresh: tuple[int, bytes]) -> Extended:
        """A reply with the pages that the sender of ``message`` does not know. ``fresh``: how many
        pages were just added, and these as packed extents."""
        unknown = self.page_count - message.have_pages
        return Extended(
            key=self.key,
            lease=self.id,
            granted_at=self.granted_at,
            first_index=message.have_pages,
            extents=fresh[1] if fresh[0] == unknown else last_extents(self.extents, unknown),
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
        """Remove and return the first ``count`` writable pages; there must be that many."""
        parts, taken = self.writable, []
        while count:
            pages = parts[0]
            size = len(pages)
            if size > count:
                parts[0] = part(pages, count, size)
                pages, size = part(pages, 0, count), count
            else:
                del parts[0]
            taken.append(pages)
            count -= size
        return taken[0] if len(taken) == 1 else join_all(taken)

    def forget(self) -> None:
        """Drop all references once the lease has ended: a closed ticket, and with it the lease,
        is remembered for long. Its tree would keep its tenant's account, with the policy's
        statistics, long after both are forgotten."""
        self.tree, self.anchor, self.writable, self.copies = NO_TREE, NO_TREE.root, [], []
        self.extents, self.page_count, self.tokens, self.copied = b"", 0, b"", ()


class Ticket:
    """A lease on its way to another worker; ``handle`` is what was offered."""

    __slots__ = (
        "expires_ms", "handle", "id", "lease", "life", "offerer", "redeemer", "withdrawn",
    )  # fmt: skip

    def __init__(
        self, id: str, lease: Lease, offerer: int, handle: Handle, expires_ms: int
    ) -> None:
        self.id, self.lease, self.offerer = id, lease, offerer
        self.handle, self.expires_ms = handle, expires_ms
        self.redeemer = 0
        self.withdrawn = False
        self.life: Lifecycle[TicketState] = Lifecycle(TICKET_MOVES, _OFFERED, "offer")


class Declaration:
    """A worker's list of the leases it holds, as far as its parts have arrived. ``since_ms``: when
    the first part arrived."""

    __slots__ = ("line_count", "lost", "named", "number", "parts", "since_ms")

    def __init__(self, number: int, since_ms: int) -> None:
        self.number, self.since_ms = number, since_ms
        self.parts: set[int] = set()
        """Numbers of the parts that have been processed."""
        self.named: set[int] = set()
        """Leases listed in these parts."""
        self.lost: list[int] = []
        """Listed leases that the worker is to forget."""
        self.line_count = 0
        """Entries in these parts; a lease may be listed twice."""


class Session:
    """One worker incarnation."""

    __slots__ = (
        "by_key", "claimed", "declared_number", "declaring", "expires_ms", "incarnation", "leases",
        "letting_go", "life", "lock_name", "mismatch_count", "model", "probed_ms", "since_ms",
        "worker",
    )  # fmt: skip

    def __init__(
        self,
        incarnation: int,
        worker: str,
        lock_name: str,
        expires_ms: int,
        life: Lifecycle[SessionState],
    ) -> None:
        self.incarnation, self.worker, self.lock_name = incarnation, worker, lock_name
        self.expires_ms, self.life = expires_ms, life
        self.model = ""
        """The model that its worker serves."""
        self.leases: dict[int, Lease] = {}
        """Leases that it holds or has yet to let go of."""
        self.by_key: dict[SequenceKey, Lease] = {}
        """Leases that it holds."""
        self.claimed: U32 = EMPTY
        """Draining pages from an earlier pager life that only this incarnation could write."""
        self.letting_go: dict[int, U32] = {}
        """Draining pages of lost leases that a declaration listed, by lease."""
        self.declaring: Declaration | None = None
        """The latest declaration, while it is incomplete."""
        self.declared_number = 0
        """Number of the last complete declaration."""
        self.mismatch_count = self.probed_ms = 0
        self.since_ms = 0
        """When it entered its present state."""

    @property
    def is_open(self) -> bool:
        return self.life.state is _OPEN

    @property
    def is_empty(self) -> bool:
        """Whether it uses no page of the pool."""
        return not self.leases and not len(self.claimed) and not self.letting_go
