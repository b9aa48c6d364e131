"""Admission: which sequences get pages now, and which wait.

A sequence that asks is served at once when no older one waits and there is room (free pages, and
idle ones that may be evicted). Otherwise it queues at its place in the one total order, and while
it is the first there, younger leases are revoked for it (``preemption``). A sequence whose prefix
is being computed waits for that first, outside the queue (``in_flight``). Answers to waiters are
pushed; asking again finds the same lease.
"""

from __future__ import annotations

from pagemesh.pager.books import Books
from pagemesh.pager.events import SetLeaseWord
from pagemesh.pager.leases.in_flight import Found
from pagemesh.pager.leases.lease import NO_TREE, Lease
from pagemesh.pager.leases.leaving import leave_queues
from pagemesh.pager.leases.needs import Needs
from pagemesh.pager.leases.overtaking import Overtaking, ahead_of
from pagemesh.pager.leases.preemption import Preemption
from pagemesh.pager.leases.promises import first_part
from pagemesh.pager.leases.quotas import Quotas
from pagemesh.pager.leases.waiting import Waiter, place_of, pushed
from pagemesh.pager.leases.waterfall import Waterfalls
from pagemesh.pager.pages.runs import Pages, pack_runs
from pagemesh.pager.retention.pins import Pins
from pagemesh.pager.retention.roots import has_root_place, tree_of
from pagemesh.pager.tiers.traffic import OnDisk, Tiers
from pagemesh.pager.tree.accounts import Account
from pagemesh.pager.tree.radix import Match, Node, Tree
from pagemesh.wire.errors import Busy, Fault, Malformed
from pagemesh.wire.messages import Order, SequenceKey
from pagemesh.wire.pager_messages import Admit, Extend, Extended, Granted, Queued, Waterfall


class Admission:
    """Admits sequences and extends leases, at once or from the queue."""

    def __init__(
        self, books: Books, preemption: Preemption, quotas: Quotas, tiers: Tiers, pins: Pins,
        waterfalls: Waterfalls,
    ) -> None:  # fmt: skip
        self._books = books
        self._tiers = tiers
        self._pins = pins
        self._waterfalls = waterfalls
        self._preemption = preemption
        self._quotas, self._tenants = quotas, books.accounts.by_tenant
        self._page_size = books.facts.page_size
        self._needs = Needs(books, quotas)
        self._overtaking = Overtaking(self._needs.outlook)

    # Requests

    def admit(self, message: Admit) -> Granted | Extended | Queued:
        """A lease for a sequence, or a place in the queue."""
        books = self._books
        session = books.open_session(message.worker, message.incarnation, message.epoch)
        lease = session.by_key.get(message.key)
        if lease is not None:
            return lease.granted()
        try:
            self._needs.require_admissible(message)
        except Fault:
            leave_queues(books, message.incarnation, message.key)  # it may be waiting already
            raise
        flights = books.in_flight
        if flights.waits and flights.ask_again(self._waiter(message, message.order)):
            return self._queued(message, 0)
        return self._serve_or_queue(message, message.order)

    def extend(self, message: Extend) -> Granted | Extended | Queued:
        """More pages for a lease, or a place in the queue."""
        lease = self._books.held_lease(
            message.worker, message.incarnation, message.lease, message.key
        )
        books, count = self._books, message.page_count - lease.page_count
        try:
            self._require_extensible(lease, message)
        except Fault:
            leave_queues(books, message.incarnation, message.key)
            raise
        if count <= 0 or (count <= lease.promised_pages and count <= books.at_hand):
            books.waiting.discard(message.incarnation, message.key)
            return lease.extended(message, self.lengthen(lease, count))
        return self._serve_or_queue(message, lease.order)

    def _require_extensible(self, lease: Lease, message: Extend) -> None:
        if message.have_pages > lease.page_count:
            raise Malformed(f"have {message.have_pages} of {lease.page_count} pages")
        self._needs.require_in_pool(message.page_count)
        if self._tenants:
            self._quotas.require_growing(lease.account, message.page_count)

    def serve_waiters(self) -> None:
        """Serve from the front of the queue for as long as there is room; a waiter that finds
        more of its prompt cached may go first (``overtaking``)."""
        books = self._books
        for _ in range(len(books.waiting)):
            if not len(books.waiting):
                return
            waiter = self._overtaking.next(books.waiting)
            if waiter is not books.waiting.first and self._overtakes(waiter):
                continue
            waiter = books.waiting.first
            try:
                if self._is_held_back(waiter):
                    continue
            except Busy:  # its tenant's list is full: when it asks again, it is told so
                books.waiting.discard(*waiter.name)
                continue
            books.trace = waiter.trace
            reply = self._try_pressing(waiter)
            while reply is None and self._lacks_pages(waiter) and self._give_way(waiter):
                reply = self._try_pressing(waiter)
            if reply is None:
                if isinstance(waiter.message, Extend):
                    self._preemption.shed_copies(books.leases[waiter.message.lease])
                return
            books.waiting.discard(*waiter.name)
            self._tell(waiter.message, reply)

    def _overtakes(self, waiter: Waiter) -> bool:
        """Serve ``waiter`` at a place just ahead of the first. Returns whether there was room."""
        books, message = self._books, waiter.message
        books.trace, first = waiter.trace, books.waiting.first
        reply = self._try(message)
        if reply is None:
            return False
        if isinstance(reply, Granted):
            lease = books.leases[reply.lease]
            lease.order = ahead_of(first.order, lease.order)
            self._overtaking.passed(books.waiting)
        books.waiting.discard(*waiter.name)
        self._tell(message, reply)
        return True

    def serve_held_back(self) -> None:
        """Let sequences that waited for their tenants go on where these use less now."""
        books = self._books
        for waiter in self._quotas.firsts():
            goes_on, stays = not self._waits_for_others(waiter.message), False
            try:
                while goes_on and (stays := self._is_held_back(waiter)):
                    if not self._give_way(waiter, self._quotas.account_of(waiter.message)):
                        break
            except Busy:  # its tree has changed tenants, and that list is full: it asks again
                goes_on = stays = False
            if stays:
                self._quotas.shed_copies(waiter)
                continue
            books.waiting.discard(*waiter.name)
            if goes_on:
                self._ask_anew(waiter)

    def serve_due(self) -> None:
        """Ask again for the sequences whose wait for a prefix has ended, the oldest first."""
        books = self._books
        while (waiter := books.in_flight.pop_due(books.now_ms)) is not None:
            self._ask_anew(waiter)

    def _ask_anew(self, waiter: Waiter) -> None:
        """Serve or queue ``waiter``, which waited for something other than room."""
        books = self._books
        books.trace = waiter.trace
        try:
            reply = self._serve_or_queue(waiter.message, waiter.order)
        except Busy:  # the queue for room is full: when it asks again, it is told so
            books.in_flight.end_wait(waiter.name)
            return
        self._tell(waiter.message, reply)

    def _tell(self, message: Admit | Extend, reply: Granted | Extended | Queued) -> None:
        """Push the outcome of ``message``, which was queued."""
        if not isinstance(reply, Queued):
            self._books.notify(message.worker, pushed(message, reply))

    # Queueing

    def older_waits(self, order: Order, key: SequenceKey, incarnation: int) -> bool:
        """Whether a sequence before ``order`` waits, and so must not be overtaken."""
        return self._books.waiting.ahead_of(place_of(order, key.attempt, incarnation)) > 0

    def _waiter(self, message: Admit | Extend, order: Order) -> Waiter:
        patience_ms = 2 * self._books.limits.ask_again_ms
        if isinstance(message, Admit):
            patience_ms = min(patience_ms, message.deadline_ms)
        place = place_of(order, message.key.attempt, message.incarnation)
        return Waiter(place, message, order, self._books.now_ms + patience_ms, self._books.trace)

    def _give_way(self, waiter: Waiter, within: Account | None = None) -> bool:
        """End an operator's pin for a waiter that lacks pages, of the pool or ``within`` its
        tenant's quota, if nothing else can help. Returns whether a pin ended."""
        message = waiter.message
        own = self._books.leases[message.lease] if isinstance(message, Extend) else None
        return self._pins.give_way(waiter.order, own, within=within)

    def _serve_or_queue(self, message: Admit | Extend, order: Order) -> Granted | Extended | Queued:
        waiting = self._books.waiting
        if self._tenants:
            if self._waits_for_others(message):  # this uses no pages of its tenant
                waiting.discard(message.incarnation, message.key)
                return self._queued(message, 0)
            if self._is_held_back(self._waiter(message, order)):
                return self._queued(message, 0)
            waiting.let_go(message.incarnation, message.key)  # it may have been held back before
        if not waiting.places:  # the usual case: nobody waits
            reply = self._try(message)
            if reply is not None:
                return reply
        waiter = self._waiter(message, order)
        if not waiting.ahead_of(waiter.place):
            reply = self._try(message) if waiting.places else None
            if reply is None:
                waiting.require_room(waiter)
                if self._press(waiter):
                    reply = self._try(message)
            if reply is not None:
                waiting.discard(*waiter.name)
                return reply
        waiting.put(waiter)
        return self._queued(message, waiting.ahead_of(waiter.place))

    def _waits_for_others(self, message: Admit | Extend) -> bool:
        """Make the sequence wait for a prefix in flight, if any. Returns whether it does."""
        flights = self._books.in_flight
        if not isinstance(message, Admit) or not flights.is_filling:
            return False
        match = self._needs.match(message)
        found = flights.find(match, message)
        return found is not None and self._waits_for(found, match, message)

    def _waits_for(self, found: Found, match: Match, message: Admit) -> bool:
        waiter = self._waiter(message, message.order)
        return found.is_fit and self._books.in_flight.wait_for(
            found, match.pages, waiter, self._books.now_ms
        )

    def _is_held_back(self, waiter: Waiter) -> bool:
        """Make ``waiter`` wait until its tenant uses less, if it must. Returns whether it does."""
        if not self._tenants:  # no tenant has a quota
            return False
        message = waiter.message
        match = self._needs.match_of(message)
        need_pages = self._needs.more_of_tenant(message, match)
        if isinstance(message, Extend) and need_pages <= 0:
            return False  # promised pages count as used already
        return self._quotas.holds_back(waiter, need_pages, match)

    def quota_room(self, lease: Lease) -> int:
        """Pages that the tenant of ``lease`` may still use."""
        return self._quotas.room(lease.account)

    def _queued(self, message: Admit | Extend, ahead_count: int) -> Queued:
        ask_again_ms = self._books.limits.ask_again_ms
        return Queued(key=message.key, ahead_count=ahead_count, ask_again_ms=ask_again_ms)

    def _try(self, message: Admit | Extend) -> Granted | Extended | Queued | None:
        """Serve now, or wait for a prefix in flight; None: there is no room."""
        if isinstance(message, Admit):
            return self._try_admit(message)
        return self._try_extend(message)

    def _try_pressing(self, waiter: Waiter) -> Granted | Extended | Queued | None:
        """``_try``, and once more if preempting younger leases freed pages."""
        reply = self._try(waiter.message)
        if reply is None and self._press(waiter):
            reply = self._try(waiter.message)
        return reply

    def _press(self, waiter: Waiter) -> bool:
        """Preempt younger leases for ``waiter``. Returns whether that freed pages at once."""
        match = self._needs.match_of(waiter.message)
        missing = self._needs.missing_pages(waiter.message, match)
        return self._preemption.press(waiter.place, missing, match)

    def _lacks_pages(self, waiter: Waiter) -> bool:
        message = waiter.message
        return self._needs.missing_pages(message, self._needs.match_of(message)) > 0

    # Serving

    def _try_admit(self, message: Admit) -> Granted | Queued | None:
        books = self._books
        if not books.slots or not has_root_place(books, message.root):
            return None
        match = self._needs.match(message)
        found = books.in_flight.find(match, message)
        if found is not None and self._waits_for(found, match, message):
            return self._queued(message, 0)
        matched = match.pages
        count = -(-message.reserve_tokens // self._page_size) - matched
        unpromised = books.pool.free - books.promises.page_count
        if count > unpromised and count > self._needs.room_beside(match):
            return None
        session, terms = books.sessions[message.incarnation], message.terms
        tree = tree_of(books, message.root, terms)
        if match.node is NO_TREE.root:
            match = Match(tree.root, tree.root, 0, 0)
        tree.model, tree.terms = session.model, terms
        on_disk = self._tiers.find(match, message) if books.disk is not None else None
        if on_disk is not None and on_disk.is_worth and self._fetch(tree, match, on_disk, message):
            return self._queued(message, 0)
        waterfall = self._waterfalls.of(message, match, found, on_disk)
        anchor, token_count = books.forest.pin_match(match), len(message.tokens) // 4
        cached_tokens = matched * self._page_size
        is_new = message.key.attempt == 1 and not message.again
        if is_new:
            books.prompt_tokens += token_count
            for reason, lost in waterfall.lost.items():
                books.lost_tokens[reason] = books.lost_tokens.get(reason, 0) + lost
        if matched:
            anchor.uses += 1
            if is_new:
                books.cached_tokens += cached_tokens
            else:  # mostly pages it computed itself before it was preempted or its worker failed
                books.again_tokens += cached_tokens
        now = count
        if message.first_tokens:
            now = first_part(count, books.facts.pages_for(message.first_tokens))
        fresh = books.take_pages(now, message.incarnation, tree)
        lease = self.start_lease(
            message.key, message.order, tree, anchor, fresh, message.tokens, 0,
            cached_tokens, waterfall, message.tokens_max,
        )  # fmt: skip
        if terms.ttl_s:
            lease.ttl_ms = 1_000 * terms.ttl_s
        books.hold(lease, session)
        if now < count:
            books.promises.give(lease, count - now)
        prompt_pages = token_count // self._page_size
        if message.read_cache and prompt_pages > matched:
            books.in_flight.enter(lease, prompt_pages)
        return lease.granted()

    def _fetch(self, tree: Tree, match: Match, on_disk: OnDisk, message: Admit) -> bool:
        """Read pages from disk and let the sequence wait for them; False: too many wait."""
        if not self._books.in_flight.has_place(self._waiter(message, message.order).name):
            return False
        load = self._tiers.load(tree, match, on_disk, message)
        return self._waits_for(Found(load, len(on_disk.records), is_fit=True), match, message)

    def start_lease(
        self,
        key: SequenceKey,
        order: Order,
        tree: Tree,
        anchor: Node,
        fresh: list[Pages],
        tokens: bytes,
        tokens_first: int,
        filled_tokens: int,
        waterfall: Waterfall,
        tokens_max: int,
    ) -> Lease:
        """A lease over the pages from the root to ``anchor``, which is pinned for it, and ``fresh``
        ones; ``tokens`` are known from ``tokens_first`` on."""
        books = self._books
        lease_id = books.pool.number()
        page_count = anchor.depth
        for pages in fresh:
            page_count += len(pages)
        lease = Lease(
            id=lease_id,
            slot=books.slots.pop(),
            key=key,
            order=order,
            tree=tree,
            anchor=anchor,
            extents=pack_runs([*books.forest.runs(anchor), *fresh]),
            page_count=page_count,
            writable=fresh,
            granted_at=lease_id,
            granted_ms=books.now_ms,
        )
        lease.tokens, lease.tokens_first = tokens, tokens_first
        lease.cached_tokens = lease.filled_tokens = filled_tokens
        lease.waterfall, lease.tokens_max, lease.trace = waterfall, tokens_max, books.trace
        books.enter(lease)
        books.out.append(SetLeaseWord(lease.slot, lease_id))
        return lease

    def _try_extend(self, message: Extend) -> Extended | None:
        books = self._books
        lease = books.leases[message.lease]
        count = message.page_count - lease.page_count
        if count > books.pool.free - books.promises.page_count:
            promised = count <= lease.promised_pages  # if broken: first come, first served
            if count > (books.at_hand if promised else books.room_for(lease.promised_pages)):
                return None
        return lease.extended(message, self.lengthen(lease, count))

    def lengthen(self, lease: Lease, count: int) -> tuple[int, bytes]:
        """Add ``count`` pages to ``lease``; there must be room. Returns count, packed extents."""
        if count <= 0:
            return 0, b""
        books = self._books
        packed = lease.grow(books.take_pages(count, lease.incarnation, lease.tree))
        books.promises.keep(lease, count)
        lease.granted_at = books.pool.last_sequence
        return count, packed
