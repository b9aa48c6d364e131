"""What the pager knows, and the small steps that every decision is made of.

``Books`` holds ledger, trees, sessions, leases, tickets and waiters, and collects commands. The
modules beside it decide; each validates first and changes the books afterwards, so that a refusal
leaves them as they were.
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

# Enum members, looked up once: a lookup takes longer than a function call.
_HELD: Final = LeaseState.HELD
_REVOKED: Final = LeaseState.REVOKED
_ENDED: Final = LeaseState.ENDED
_OPEN: Final = SessionState.OPEN
_FREE_HEADER: Final = HeaderState.FREE
_HELD_HEADER: Final = HeaderState.HELD
_SPARE_PAGES_MAX, _SPARE_SHARE = 256, 256
"""Pages evicted beyond what is needed: at most 256, and at most 1/256 of the pool."""
_RECLAIMED_EDGES_MAX, _RECLAIMED_PAGES_MAX = 256, 8_192  # of what expired, in one tick


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
        self.revoked: dict[int, Lease] = {}  # those whose holders have not let go yet
        self.youngest = FIRST.place
        """No lease that can be revoked has a later place than this."""
        self.tickets: dict[str, Ticket] = {}
        self.closed: OrderedDict[str, Ticket] = OrderedDict()
        self.ended = EndedLeases(limits.ended_count_max)
        self.pins: dict[str, Pin] = {}
        self.slots = array("I", range(limits.lease_count_max - 1, -1, -1))  # free lease slots
        self.slots_kept: dict[int, int] = {}  # those of an earlier life, with their lease ids
        self.root_lines = RootLines()
        self.hidden = np.zeros(facts.page_count, bool)  # pages that routers were told are gone
        self.unsettled: set[int] = set()
        """Live incarnations that have yet to declare what they use from an earlier pager life."""
        self.limbo: U32 = EMPTY
        """Draining pages that unsettled incarnations or holders of lost leases may still use."""
        self.given_up: U32 = EMPTY  # pages of ``limbo`` not to be found again (``giving_up``)
        self.disk: DiskTier | None = None  # None: no tier, not open yet, or failed
        self.loads: dict[int, Load] = {}  # what is being read from disk
        self.out: list[Command] = []
        self.late: list[Command] = []
        self.now_ms = 0
        self.freed = False  # pages became available: waiters may be served
        self.preempted_count = 0
        self.prompt_tokens = self.cached_tokens = self.again_tokens = 0
        """Prompt tokens admitted in this life, those of them that were cached, and the cached ones
        of prompts admitted again, which count in neither of the first two."""
        self.lost_tokens: dict[str, int] = {}  # admitted, not cached: by reason (``Waterfall``)
        self.trace = ""
        """The trace of the request being served."""

    # Decisions in methods of their own, so that a simulation can plant bugs in them

    def first_sequence(self) -> int:
        """Above every ledger number of earlier epochs."""
        return self.facts.first_sequence

    def must_drain(self, lease: Lease) -> bool:
        """Whether the pages of a revoked lease stay unused until its holder lets go."""
        return lease.life.state is _REVOKED

    def may_evict(self) -> bool:
        """Whether idle pages may be given to others: not while a worker that an earlier pager life
        let read them has yet to declare what it uses."""
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
        session = self.sessions.get(incarnation)  # open_session inlined: most messages come here
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
        """Pages that anybody can have at once: those at hand and not promised. Negative when pages
        that were promised have been pinned."""
        return self.room_for(0)

    @property
    def at_hand(self) -> int:
        """Free pages, and idle ones if they may be evicted."""
        return self.pool.free + (self.pool.idle if self.may_evict() else 0)

    def room_for(self, promised_pages: int) -> int:
        """Pages that somebody who was promised ``promised_pages`` of them can have at once."""
        pool, at_hand = self.pool, self.at_hand
        room = pool.free + pool.idle - self.promises.page_count + promised_pages
        return room if room < at_hand else at_hand

    def take_pages(self, count: int, writer: int, tree: Tree) -> list[Pages]:
        """``count`` pages for ``writer``, evicting as needed; so many must be ``at_hand``. Usually
        they are one run; each item of the list is a grant of its own."""
        if not count:
            return []
        free = self.pool.free
        if count <= free:
            pages, sequences = self.pool.take(count)
            self.out.append(WriteHeaders(pages, _HELD_HEADER, sequences, writer, tree.index))
            return [pages]
        # Keep a few free pages for growth: using them would split what is evicted whole.
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
        """Publish a state, leaving other parts of the headers alone."""
        if len(pages):
            self.out.append(SetStates(pages, state, self.pool.sequences_of(pages)))

    # Leases

    def enter(self, lease: Lease) -> None:
        """Enter ``lease`` into the books; its slot is taken already."""
        tree = lease.tree
        tree.lease_count += 1
        own_pages = len(lease.held_pages) if lease.copies else lease.page_count - lease.anchor.depth
        tree.root.account.used_pages += own_pages
        self.leases[lease.id] = lease
        if (place := lease.order.place) > self.youngest:
            self.youngest = place

    def hold(self, lease: Lease, session: Session) -> None:
        """Let ``session`` hold ``lease``, and no longer wait for one for that sequence."""
        lease.incarnation = session.incarnation
        session.leases[lease.id] = lease
        session.by_key[lease.key] = lease
        if self.waiting.count:
            self.waiting.discard(session.incarnation, lease.key)
        if self.in_flight.waits:
            self.in_flight.end_wait((session.incarnation, lease.key))

    def unhold(self, lease: Lease) -> None:
        """Stop finding ``lease`` by its key, and end its holder's wait under that key."""
        if self.waiting.count:
            self.waiting.discard(lease.incarnation, lease.key)
        session = self.sessions.get(lease.incarnation)
        if session is not None and session.by_key.get(lease.key) is lease:
            del session.by_key[lease.key]

    def forget_waiters(self, incarnation: int) -> None:
        """End all waits of a worker incarnation."""
        self.waiting.discard_session(incarnation)
        self.in_flight.end_waits_of(incarnation)

    def break_promise(self, lease: Lease) -> None:
        """Take back the pages promised to ``lease``."""
        if lease.promised_pages:
            self.promises.take_back(lease)
            self.freed = True

    def revoke(self, lease: Lease, reason: RevokeReason) -> None:
        """Revoke a held lease: clear its word first, then tell the holder. Pages that it can write
        drain until it lets go of them."""
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
        """Give back everything of ``lease``, which its holder does not use any more."""
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
        if state is _HELD:  # otherwise a waiter under its key is for a newer lease
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
        """Uncache idle leaves from ``node`` upwards, leaving ``above_pages`` of the path. Does
        nothing while a worker has yet to declare what it reads: then a sweep does it."""
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
        """Uncache some of what has expired: a tick's worth."""
        if not len(self.forest.lifetimes) or not self.may_evict():
            return
        pages_max, edges_max = _RECLAIMED_PAGES_MAX, _RECLAIMED_EDGES_MAX
        for node in self.forest.lifetimes.over(self.now_ms, edges_max):
            leaf = node
            while min(pages_max, edges_max) > 0 and len(node.pages):
                while leaf.children:  # onwards, not from the top: there may be thousands
                    leaf = next(iter(leaf.children.values()))
                above, size = leaf.parent, len(leaf.pages)
                pages_max, edges_max = pages_max - size, edges_max - 1
                self.drop(leaf, leaf.depth - size, Why.EXPIRED)
                self.freed, leaf = True, above
            if len(node.pages):
                self.forest.lifetimes.again(node, self.now_ms)

    # After a restart

    def free_claimed(self, session: Session) -> None:
        """Free the pages of an earlier life that ``session`` could write: nobody uses them now."""
        self._free_drained(session.claimed)
        session.claimed = EMPTY

    def let_go(self, session: Session, lease_id: int) -> None:
        """``session`` has let go of the pages of a lost lease that it had declared."""
        if (pages := session.letting_go.pop(lease_id, None)) is not None:
            self._free_drained(pages)
            self.settle()

    def settle(self) -> None:
        """Once all have declared or died, free what was kept, but not what lost leases may use."""
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
        """Free draining ``pages`` that nobody uses any more."""
        if len(pages):
            self.pool.settle(pages)
            self.set_states(pages, HeaderState.FREE)
            self.freed = True

    # Telling

    def tell_dropped(self, pages: Pages) -> None:
        """Tell routers that ``pages`` are not cached any more, unless they know already."""
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
