"""What the pager knows, and the small steps that every decision is made of.

``Books`` holds ledger, trees, sessions, leases, tickets and waiters, and collects commands.
The modules beside it decide; each validates first and changes the books after, so that a
refusal leaves them as they were.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from pagemesh.pager.events import (
    Command,
    Notify,
    PagesDropped,
    SetLeaseWord,
    SetStates,
    WriteHeaders,
)
from pagemesh.pager.eviction import EvictionPolicy
from pagemesh.pager.leases.ended import EndedLeases
from pagemesh.pager.leases.in_flight import InFlight
from pagemesh.pager.leases.lease import Lease, Session, Ticket
from pagemesh.pager.leases.promises import Promises
from pagemesh.pager.leases.states import LeaseState, RevokeReason, SessionState
from pagemesh.pager.leases.waiting import FIRST, Queues
from pagemesh.pager.leases.waste import Waste, waste_of
from pagemesh.pager.limits import PagerLimits, PoolFacts
from pagemesh.pager.pages.column import Numbers
from pagemesh.pager.pages.pool import PagePool
from pagemesh.pager.pages.runs import Pages, part
from pagemesh.pager.retention.root_lines import RootLines
from pagemesh.pager.retention.roots import leave_retired, unhidden
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.load import Load
from pagemesh.pager.tree.accounts import Accounts, NewPolicy
from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.pager.tree.radix import Forest, Node, Tree
from pagemesh.wire.errors import Gone, Malformed, Stale
from pagemesh.wire.messages import Message, SequenceKey
from pagemesh.wire.pager_messages import Revoke
from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import EMPTY, U32

if TYPE_CHECKING:
    from pagemesh.pager.retention.pins import Pin

# Members of enums, looked up once: each time that would take longer than a call.
_HELD: Final = LeaseState.HELD
_REVOKED: Final = LeaseState.REVOKED
_ENDED: Final = LeaseState.ENDED
_OPEN: Final = SessionState.OPEN
_FREE_HEADER: Final = HeaderState.FREE
_HELD_HEADER: Final = HeaderState.HELD
_SPARE_PAGES_MAX, _SPARE_SHARE = 256, 256
"""Evicted beyond what is needed: at most so many pages, and so small a share of the pool."""
_RECLAIMED_EDGES_MAX, _RECLAIMED_PAGES_MAX = 256, 8_192  # of what is over, in one tick


class Books:
    """All state of one pager life."""

    def __init__(
        self, limits: PagerLimits, facts: PoolFacts, policy: EvictionPolicy, new_policy: NewPolicy
    ) -> None:
        self.limits = limits
        self.facts = facts
        self.pool = PagePool(facts.page_count, self.first_sequence())
        self.accounts = Accounts(
            facts.page_count, policy, new_policy, waiter_count_max=limits.waiter_count_max
        )
        self.forest = Forest(self.pool, facts.page_size, self.accounts)
        self.waiting = Queues(limits.waiter_count_max)
        self.in_flight = InFlight(self.forest, facts.page_size, limits)
        self.promises = Promises()
        self.sessions: dict[int, Session] = {}
        self.by_worker: dict[str, Session] = {}
        self.leases: dict[int, Lease] = {}
        self.revoked: dict[int, Lease] = {}  # of ``leases``: their holders have not let go yet
        self.youngest = FIRST.place
        """No lease that can be taken back is after this."""
        self.tickets: dict[str, Ticket] = {}
        self.closed: OrderedDict[str, Ticket] = OrderedDict()
        self.ended = EndedLeases(limits.ended_count_max)
        self.pins: dict[str, Pin] = {}
        self.slots = array("I", range(limits.lease_count_max - 1, -1, -1))  # of leases, free
        self.slots_kept: dict[int, int] = {}  # of an earlier life, to the lease in their word
        self.root_lines = RootLines()
        self.hidden = np.zeros(facts.page_count, bool)  # of retired roots, for routers
        self.unsettled: set[int] = set()
        """Live incarnations that may use pages in ways this pager life has not heard of."""
        self.limbo: U32 = EMPTY
        """Draining pages that any of the unsettled may use, or of a lease that is lost."""
        self.given_up: U32 = EMPTY  # of ``limbo``: not to be found again (``giving_up``)
        self.disk: DiskTier | None = None  # there is none, or it has failed
        self.loads: dict[int, Load] = {}  # what is being read from disk
        self.out: list[Command] = []
        self.late: list[Command] = []
        self.now_ms = 0
        self.freed = False  # pages became available: waiters may be served
        self.preempted_count = 0
        self.prompt_tokens = self.cached_tokens = self.again_tokens = 0
        """Admitted in this life, those of them that were cached, and what was cached of prompts
        that were admitted again, which are in neither."""
        self.lost_tokens: dict[str, int] = {}  # of those admitted, by reason (``Waterfall``)
        self.trace = ""
        """The trace of whoever is being served."""

    # Decisions on their own, so that a simulation can plant bugs in them

    def first_sequence(self) -> int:
        """Above every ledger number of earlier epochs."""
        return self.facts.first_sequence

    def must_drain(self, lease: Lease) -> bool:
        """Whether the pages of a revoked lease stay unused until its holder lets go."""
        return lease.life.state is _REVOKED

    def may_evict(self) -> bool:
        """Whether idle pages may be given out anew: not while somebody whom an earlier pager
        life let read them has not said so."""
        return not self.unsettled

    # Looking things up

    def open_session(self, worker: str, incarnation: int, epoch: int) -> Session:
        """The open session of a worker. Raises ``Stale`` when there is none in this life."""
        session = self.sessions.get(incarnation)
        if epoch != self.facts.epoch:
            raise Stale(f"epoch {epoch} is over, this is {self.facts.epoch}: open a session")
        if session is None or session.life.state is not _OPEN or session.worker != worker:
            raise Stale(f"no session of {worker} incarnation {incarnation}: open one")
        return session

    def held_lease(self, worker: str, incarnation: int, lease: int, key: SequenceKey) -> Lease:
        """The lease, held by that incarnation. Raises ``Gone``, ``Stale`` or ``Malformed``."""
        session = self.sessions.get(incarnation)  # as in open_session: most messages come here
        if session is None or session.worker != worker or session.life.state is not _OPEN:
            raise Stale(f"no session of {worker} incarnation {incarnation}: open one")
        found = self.leases.get(lease)
        if found is None:
            raise Gone(f"lease {lease:x} is not there (any more): forget it, and admit again")
        if found.incarnation != incarnation:
            raise Stale(f"lease {lease:x} is not held by incarnation {incarnation}: admit again")
        if found.key != key:
            raise Malformed(f"lease {lease:x} is another sequence's: name its own")
        if found.life.state is not _HELD:
            raise Stale(f"lease {lease:x} is {found.life.state.value}: admit again")
        return found

    # Room

    @property
    def room(self) -> int:
        """Pages that anybody can have at once: what is at hand and not promised. Below 0 when
        something that was promised has been pinned."""
        return self.room_for(0)

    @property
    def at_hand(self) -> int:
        """Free pages, and idle ones if they may be evicted."""
        return self.pool.free + (self.pool.idle if self.may_evict() else 0)

    def room_for(self, promised_pages: int) -> int:
        """Pages that somebody can have at once to whom so many of those promised are."""
        pool, at_hand = self.pool, self.at_hand
        room = pool.free + pool.idle - self.promises.page_count + promised_pages
        return room if room < at_hand else at_hand

    def take_pages(self, count: int, writer: int, tree: Tree) -> list[Pages]:
        """``count`` pages for ``writer``, evicting as needed; so many are ``at_hand``. Mostly they
        are one run; each in the list is granted on its own."""
        if not count:
            return []
        free = self.pool.free
        if count <= free:
            pages, sequences = self.pool.take(count)
            self.out.append(WriteHeaders(pages, _HELD_HEADER, sequences, writer, tree.index))
            return [pages]
        # A few free pages are left for growth, rather than tear what is evicted whole.
        spare_pages_max = min(_SPARE_PAGES_MAX, self.pool.total // _SPARE_SHARE)
        leave = free <= spare_pages_max and count <= self.pool.idle
        grants, spare = self.forest.reuse(count if leave else count - free, spare_pages_max)
        for pages, _ in grants:
            self.tell_dropped(pages)
        for pages in spare:
            self.set_states(pages, _FREE_HEADER)
            self.tell_dropped(pages)
        if free and not leave:
            grants.append(self.pool.take(free))
        for pages, sequences in grants:
            self.write_held(pages, sequences, writer, tree)
        return [pages for pages, _ in grants]

    def write_held(self, pages: Pages, sequences: Numbers, writer: int, tree: Tree) -> None:
        """Publish ``pages`` as held by ``writer``."""
        if len(pages):
            self.out.append(WriteHeaders(pages, _HELD_HEADER, sequences, writer, tree.index))

    def set_states(self, pages: Pages, state: HeaderState) -> None:
        """Publish a state that needs no other part of the header."""
        if len(pages):
            self.out.append(SetStates(pages, state, self.pool.sequences_of(pages)))

    # Leases

    def enter(self, lease: Lease) -> None:
        """``lease`` stands from now on; its slot is taken already."""
        tree = lease.tree
        tree.lease_count += 1
        own_pages = len(lease.held_pages) if lease.copies else lease.page_count - lease.anchor.depth
        tree.root.account.used_pages += own_pages
        self.leases[lease.id] = lease
        if (place := lease.order.place) > self.youngest:
            self.youngest = place

    def hold(self, lease: Lease, session: Session) -> None:
        """``session`` holds ``lease`` from now on, and waits for none for its sequence."""
        lease.incarnation = session.incarnation
        session.leases[lease.id] = lease
        session.by_key[lease.key] = lease
        if self.waiting.count:
            self.waiting.discard(session.incarnation, lease.key)
        if self.in_flight.waits:
            self.in_flight.end_wait((session.incarnation, lease.key))

    def unhold(self, lease: Lease) -> None:
        """Nobody holds ``lease`` by key any more, nor is waiting on it."""
        if self.waiting.count:
            self.waiting.discard(lease.incarnation, lease.key)
        session = self.sessions.get(lease.incarnation)
        if session is not None and session.by_key.get(lease.key) is lease:
            del session.by_key[lease.key]

    def forget_waiters(self, incarnation: int) -> None:
        """A worker incarnation waits for nothing any more."""
        self.waiting.discard_session(incarnation)
        self.in_flight.end_waits_of(incarnation)

    def break_promise(self, lease: Lease) -> None:
        """What ``lease`` was promised is anybody's."""
        if lease.promised_pages:
            self.promises.take_back(lease)
            self.freed = True

    def revoke(self, lease: Lease, reason: RevokeReason) -> None:
        """Take a held lease back: the word first, then the holder is told. What it can write
        drains until it lets go."""
        self.out.append(SetLeaseWord(lease.slot, 0))
        held = lease.held_pages
        lease.life.move(LeaseState.REVOKED, reason)
        self.revoked[lease.id] = lease
        self.break_promise(lease)
        self.in_flight.leave(lease)
        self.unhold(lease)
        lease.revoked_ms = self.now_ms
        self.pool.drain(held)
        self.set_states(held, HeaderState.DRAINING)
        self.notify_revoked(lease, reason)
        if not self.must_drain(lease):
            self.end(lease, reason)

    def notify_revoked(self, lease: Lease, reason: RevokeReason) -> None:
        """Tell the holder of a revoked lease, again if need be."""
        session = self.sessions.get(lease.incarnation)
        lease.reason, lease.notified_ms = reason, self.now_ms
        if session is not None and session.worker:
            notice = Revoke(key=lease.key, lease=lease.id, reason=reason, usage=self.usage())
            self.notify(session.worker, notice)

    def notify(self, worker: str, message: Message) -> None:
        self.out.append(Notify(worker, message))

    def end(self, lease: Lease, why: str) -> None:
        """Give everything of ``lease`` back. Its holder does not use it any more."""
        held, tree, anchor, lease_id = lease.held_pages, lease.tree, lease.anchor, lease.id
        state = lease.life.state
        if state is _REVOKED:
            self.pool.settle(held)
            del self.revoked[lease_id]
        else:
            self.out.append(SetLeaseWord(lease.slot, 0))
            self.pool.give(held)
        tree.root.account.used_pages -= len(held)
        self.break_promise(lease)
        lease.life.move(_ENDED, why)
        self.set_states(held, _FREE_HEADER)
        if lease.prompt_pages:
            self.in_flight.leave(lease)
        if state is _HELD:  # else whoever waits under its key has asked for another lease since
            self.unhold(lease)
        if (session := self.sessions.get(lease.incarnation)) is not None:
            session.leases.pop(lease_id, None)
        until_ms = self.now_ms + lease.ttl_ms if lease.ttl_ms else FOREVER_MS
        self.forest.used(anchor, until_ms, -lease.order.priority)
        self.forest.unpin(anchor)
        tree.lease_count -= 1
        if tree.is_retired:
            leave_retired(self, tree, anchor)
        lease.forget()
        del self.leases[lease_id]
        self.slots.append(lease.slot)
        self.ended.add(lease_id, lease.incarnation)
        self.freed = True

    def drop(self, node: Node, above_pages: int, why: Why) -> None:
        """Uncache idle leaves from ``node`` upwards, down to ``above_pages`` from the root, if all
        have declared what they read: else a sweep does."""
        while self.may_evict() and not (node.is_root or node.pins or node.children):
            count = min(len(node.pages), node.depth - above_pages)
            if count <= 0:
                return
            pages, parent = part(node.pages, len(node.pages) - count, len(node.pages)), node.parent
            self.forest.trim(node, count, why)
            self.set_states(pages, HeaderState.FREE)
            self.tell_dropped(pages)
            node = parent

    def reclaim(self) -> None:
        """Uncache some of what is over: a tick's worth."""
        if not len(self.forest.lifetimes) or not self.may_evict():
            return
        pages_max, edges_max = _RECLAIMED_PAGES_MAX, _RECLAIMED_EDGES_MAX
        for node in self.forest.lifetimes.over(self.now_ms, edges_max):
            leaf = node
            while min(pages_max, edges_max) > 0 and len(node.pages):
                while leaf.children:  # not from the top each time: there may be thousands
                    leaf = next(iter(leaf.children.values()))
                above, size = leaf.parent, len(leaf.pages)
                pages_max, edges_max = pages_max - size, edges_max - 1
                self.drop(leaf, leaf.depth - size, Why.EXPIRED)
                self.freed, leaf = True, above
            if len(node.pages):
                self.forest.lifetimes.again(node, self.now_ms)

    # After a restart

    def free_claimed(self, session: Session) -> None:
        """The pages of an earlier life that ``session`` could write are in nobody's hands."""
        self._free_drained(session.claimed)
        session.claimed = EMPTY

    def let_go(self, session: Session, lease_id: int) -> None:
        """``session`` is done with the pages of a lease that it declared and has lost."""
        if (pages := session.letting_go.pop(lease_id, None)) is not None:
            self._free_drained(pages)
            self.settle()

    def settle(self) -> None:
        """Nothing is uncertain once all have declared or died, but what is of a lost lease."""
        if self.unsettled:
            return
        lost = [pages for one in self.sessions.values() for pages in one.letting_go.values()]
        if not lost:
            self._free_drained(self.limbo)
            self.limbo = EMPTY
        for slot in self.slots_kept:
            self.out.append(SetLeaseWord(slot, 0))
            self.slots.append(slot)
        self.slots_kept, self.given_up = {}, EMPTY
        self.root_lines.settle(np.concatenate([self.limbo, *lost]))
        self.freed = True

    def _free_drained(self, pages: U32) -> None:
        """Draining ``pages`` are used by nobody any more."""
        if len(pages):
            self.pool.settle(pages)
            self.set_states(pages, HeaderState.FREE)
            self.freed = True

    # Telling

    def tell_dropped(self, pages: Pages) -> None:
        """Routers hear that ``pages`` are not cached any more, unless they knew."""
        untold = unhidden(self, pages) if self.forest.retired else pages
        if len(untold):
            self.late.append(PagesDropped(untold))

    def usage(self) -> str:
        """The ledger in a sentence."""
        pool = self.pool
        return (
            f"{pool.total} pages: {pool.free} free, {pool.held} held, {pool.pinned} pinned, "
            f"{pool.idle} idle, {pool.draining} draining"
        )

    @property
    def waste(self) -> Waste:
        """What leases take and do not fill, counted now."""
        return waste_of(self.leases.values(), self.facts.page_size)

    def anchors(self) -> Iterable[Node]:
        holders = (self.leases, self.loads, self.pins)
        return (one.anchor for some in holders for one in some.values())
