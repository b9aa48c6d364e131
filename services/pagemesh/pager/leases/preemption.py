"""Preemption: older sequences take pages back from younger ones.

There is one total order of sequences, across prefill, tickets and decode. It also orders the
attempts at one sequence, two of which may exist for a while. When the first waiter cannot be
served even by evicting, the youngest leases behind it are revoked until the pages that are free
or draining suffice. The oldest sequence can therefore always go on, and nobody waits for a younger
one: no deadlock, and no livelock.

A worker that owes pages for longer than most steps take is *late*. It may be frozen, and then only
its death gives the pages back, seconds later. So if the workers that are not late can give enough,
nobody waits for a late one. If they cannot, pages that a late worker owes count as on their way
like any others, so a waiter has pages taken from it once, however long its step is.
"""

from __future__ import annotations

from collections.abc import Callable

from pagemesh.pager.books import Books
from pagemesh.pager.leases.lease import Lease
from pagemesh.pager.leases.states import LeaseState
from pagemesh.pager.leases.waiting import Place, place_of
from pagemesh.pager.tree.accounts import Account
from pagemesh.pager.tree.radix import Match, Node


class _Own:
    """Pages that the waiter itself would pin, and so does not gain when others unpin them.
    ``taken``: how many pins of each node are assumed to be gone; -1: one more than now."""

    def __init__(self, match: Match | None) -> None:
        self.taken: dict[Node, int] = {}
        self._edge, self._edge_pages = None if match is None else match.edge, 0
        if match is None:
            return
        node = match.node
        while not (node.pins or node.is_root):  # idle nodes were counted as pinned already
            node = node.parent
        self.taken[node] = -1
        if match.edge_pages and match.edge.pins:
            self.taken[match.edge] = 0
            self._edge_pages = match.edge_pages

    def gained(self) -> int:
        """Pages of the partly matched edge that the waiter itself would pin, once nobody else pins
        that edge: they were counted as gained. Reported once, 0 before and after."""
        edge, pages = self._edge, self._edge_pages
        if not pages or edge is None or self.taken[edge] < edge.pins:
            return 0
        self._edge_pages = 0
        return pages


class Preemption:
    """Chooses victims. ``close_offer`` ends an offered lease and its ticket."""

    def __init__(self, books: Books, close_offer: Callable[[Lease], None]) -> None:
        self._books = books
        self._close_offer = close_offer

    def press(
        self, place: Place, missing_pages: int, match: Match | None, *,
        within: Account | None = None,
    ) -> bool:  # fmt: skip
        """Revoke younger leases for the waiter at ``place``, which itself would pin ``match``.
        Returns whether that freed pages at once. ``within``: the tenant whose quota is short; only
        its leases are revoked."""
        books = self._books
        if missing_pages <= 0:
            return False
        late = self._late()
        victims = self._victims(place, missing_pages, match, within, late)
        if victims is None and late:
            victims = self._victims(place, missing_pages, match, within, set())
        if not victims:
            return False  # enough is on its way, or only older leases could give enough
        before = books.room if within is None else within.used_pages
        for lease in victims:
            books.preempted_count += 1
            if lease.life.state is LeaseState.OFFERED:
                self._close_offer(lease)
            else:
                books.revoke(lease, "preempted")
        return books.room > before if within is None else within.used_pages < before

    def _victims(
        self, place: Place, missing: int, match: Match | None, within: Account | None,
        late: set[int],
    ) -> list[Lease] | None:  # fmt: skip
        """The leases to revoke for ``missing`` pages, less those on their way; None when the
        younger leases hold too few. Pages that incarnations in ``late`` owe or hold are ignored."""
        books = self._books
        own = _Own(match)
        taken = own.taken
        missing -= 0 if within is not None else self._on_its_way(late)
        for lease in books.revoked.values():
            if lease.incarnation not in late and (within is None or lease.account is within):
                missing -= self._unpinned(lease, taken, within)
                missing -= len(lease.held_pages) if within is not None else 0
        missing += own.gained()
        victims: list[Lease] = []
        for lease in self._younger(place) if missing > 0 else ():
            if missing <= 0:
                break
            if within is not None and lease.account is not within:
                continue
            if lease.incarnation in late and lease.life.state is LeaseState.HELD:
                continue  # (the pages of an offered lease would come back at once)
            victims.append(lease)
            missing -= len(lease.held_pages) + lease.promised_pages
            missing -= self._unpinned(lease, taken, within)
            missing += own.gained()
        return victims if missing <= 0 else None

    def shed_copies(self, lease: Lease, *, within: Account | None = None) -> None:
        """Revoke a lease that waits for room which its own private copies of cached pages take up.

        It holds both: the copies and, through its anchor, the tree's pages. When no older lease
        exists and nothing drains, nothing else can make room. Admitted again, the sequence reads
        the tree's pages and needs no copies of them."""
        books, late = self._books, self._late()
        if not lease.copies or self._on_its_way(late):
            return
        for other in books.leases.values():
            if within is not None and other.account is not within:
                continue
            if other.incarnation in late and other.life.state is LeaseState.REVOKED:
                continue
            if other.order.place < lease.order.place or other.life.state is LeaseState.REVOKED:
                return
        books.preempted_count += 1
        books.revoke(lease, "preempted")

    def _late(self) -> set[int]:
        """Incarnations that were told to let go of a lease long ago, and have not done so."""
        books, late_ms = self._books, self._books.limits.drain_late_ms
        revoked = books.revoked.values()
        return {one.incarnation for one in revoked if books.now_ms - one.revoked_ms >= late_ms}

    def _on_its_way(self, late: set[int]) -> int:
        """Draining pages, without those that incarnations in ``late`` owe."""
        books = self._books
        if not late:
            return books.pool.draining
        owed = sum(len(one.held_pages) for one in books.revoked.values() if one.incarnation in late)
        return books.pool.draining - owed

    def _younger(self, place: Place) -> list[Lease]:
        """Leases after ``place``, the youngest first."""
        books, order = self._books, place[:3]
        if order > books.youngest:
            return []  # usual under load: waiters come after those being served
        younger = [
            lease
            for lease in books.leases.values()
            if lease.life.state in (LeaseState.HELD, LeaseState.OFFERED) and _place(lease) > place
        ]
        if not younger:
            books.youngest = order
        younger.sort(key=_place, reverse=True)
        return younger

    def _unpinned(self, lease: Lease, taken: dict[Node, int], within: Account | None) -> int:
        """Further pages that become idle, and so evictable, once ``lease`` is gone too."""
        if not self._books.may_evict() and within is None:
            return 0
        return self._books.forest.try_unpin(lease.anchor, taken)


def _place(lease: Lease) -> Place:
    return place_of(lease.order, lease.key.attempt, lease.incarnation)
