"""The pager's audit of itself: the report that others read, and the checks that tests make."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

import numpy as np

from pagemesh.pager.books import Books
from pagemesh.pager.leases.lease import Lease
from pagemesh.pager.leases.states import LeaseState, SessionState, TicketState
from pagemesh.pager.pages.pool import PagePool
from pagemesh.pager.pages.runs import Pages, join_all, table_of
from pagemesh.pager.recount import Recount, owner_of, recount
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.pager.tree.node import UNLINKED
from pagemesh.pager.tree.radix import Forest, Node
from pagemesh.wire.pager_messages import Admit
from pagemesh.wire.pager_reports import LeaseLine, PagerReport
from pagemesh.wire.pool_format import ROOT_COUNT_MAX, HeaderState
from pagemesh.wire.tokens import U32

_LINES_MAX = 4_096
_DEAD, _OFFERED = SessionState.DEAD, LeaseState.OFFERED


def report(books: Books, after: int = 0) -> PagerReport:
    """The ledger, counters and at most 4,096 leases: those with the lowest ids above ``after``.
    Faults are looked for only in the first part of a listing (``after`` is 0)."""
    pool, facts, disk = books.pool, books.facts, books.disk
    leases, more = _leases(books, after)
    found = Recount() if after else recount(books)
    return PagerReport(
        host=facts.host,
        epoch=facts.epoch,
        pool_incarnation=facts.incarnation,
        page_size=facts.page_size,
        page_bytes=facts.page_bytes,
        total_pages=pool.total,
        free_pages=pool.free,
        held_pages=pool.held,
        pinned_pages=pool.pinned,
        idle_pages=pool.idle,
        draining_pages=pool.draining,
        evicted_pages=pool.evicted,
        preempted_count=books.preempted_count,
        session_count=sum(1 for session in books.sessions.values() if session.is_open),
        workers=sorted(_workers(books)),
        ticket_count=len(books.tickets),
        waiter_count=books.waiting.count + books.in_flight.wait_count,
        disk_slots=0 if disk is None else disk.slot_count,
        disk_pages=0 if disk is None else _written_pages(disk),
        unclaimed_pages=_unclaimed_pages(books),
        leased_pages=found.leased_pages,
        lease_count=len(books.leases),
        offered_count=sum(1 for one in books.leases.values() if one.life.state is _OFFERED),
        faults=found.faults,
        are_pins_counted=found.are_pins_counted,
        leases=[_line(books, lease) for lease in leases],
        more=more,
    )


def _leases(books: Books, after: int) -> tuple[list[Lease], bool]:
    """The first leases above ``after``, and whether there are more. By id, since the table is in no
    order (leases of an earlier life are restored in any) and leases end between two parts."""
    later = [lease for number, lease in books.leases.items() if number > after]
    first = nsmallest(_LINES_MAX, later, key=lambda lease: lease.id)
    return first, len(later) > len(first)


def _workers(books: Books) -> set[str]:
    sessions = books.sessions.values()
    return {one.worker for one in sessions if one.worker and one.life.state is not _DEAD}


def _line(books: Books, lease: Lease) -> LeaseLine:
    return LeaseLine(
        lease=lease.id,
        key=lease.key,
        owner=owner_of(books, lease),
        state=lease.life.state.value,
        page_count=lease.page_count,
        filled_tokens=lease.filled_tokens,
        held_pages=len(lease.held_pages),
        incarnation=lease.incarnation,
        expires_in_ms=_expires_in_ms(books, lease),
        trace=lease.trace,
    )


def _expires_in_ms(books: Books, lease: Lease) -> int:
    ticket = books.tickets.get(lease.ticket)
    return 0 if ticket is None else max(0, ticket.expires_ms - books.now_ms)


def _written_pages(disk: DiskTier) -> int:
    """Pages that can be found on disk and are not waiting to be written. Of the waiting ones, some
    may have been dropped since; these cannot be found and are not in ``page_count``."""
    waiting = (one for one in disk.staged.values() if disk.find(one.shelf.root, one.chain) is one)
    return disk.page_count - sum(1 for _ in waiting)


def _unclaimed_pages(books: Books) -> int:
    """Held or draining pages that belong to no lease."""
    pages = len(books.limbo) + sum(len(load.pages) for load in books.loads.values())
    for session in books.sessions.values():
        pages += len(session.claimed) + sum(map(len, session.letting_go.values()))
    return pages


def check_books(books: Books) -> None:
    """Raise ``AssertionError`` when any two of the books' tables disagree."""
    books.pool.check()
    check_forest(books.forest, books.pool, books.anchors())
    books.waiting.check()
    _check_accounts(books)
    _check_promises(books)
    tables = {lease.id: lease.table for lease in books.leases.values()}  # each access unpacks it
    _check_pages(books, tables)
    _check_leases(books, tables)
    _check_tickets(books)
    for session in books.sessions.values():
        assert books.sessions[session.incarnation] is session
    books.in_flight.check({**books.leases, **books.loads})
    if books.disk is not None:
        books.disk.check()
    for waiter in [*books.waiting, *books.waiting.held_back(), *books.in_flight.waiters()]:
        session = books.sessions[waiter.message.incarnation]
        assert session.is_open, "a waiter without a session"
        if isinstance(waiter.message, Admit):
            assert waiter.message.key not in session.by_key, "it holds what it waits for"
    queued = {waiter.name for waiter in [*books.waiting, *books.waiting.held_back()]}
    for waiter in books.in_flight.waiters():
        assert waiter.name not in queued, "it waits for others to compute, and for room"


def _check_promises(books: Books) -> None:
    promised = sum(lease.promised_pages for lease in books.leases.values())
    assert promised == books.promises.page_count, "a promise is counted for nobody"
    for lease in books.leases.values():
        held = lease.life.state is LeaseState.HELD
        assert lease.promised_pages >= 0 and (held or not lease.promised_pages), "a void promise"
    waste = books.waste
    assert 0 <= waste.internal_slots <= waste.unfilled_slots <= waste.contiguous_slots


def _check_accounts(books: Books) -> None:
    """Each tenant is charged once for each page that its leases hold or its trees contain. That
    stays within its quota, except that content which a lease computed although it was cached counts
    twice until the lease ends."""
    accounts = books.accounts
    accounts.check()
    used = dict.fromkeys(accounts, 0)
    idle, trees, promised = used.copy(), used.copy(), used.copy()
    for tree in [*books.forest.trees.values(), *books.forest.retired.values()]:
        account = tree.root.account
        trees[account] += 1
        for node in tree.root.below():
            assert node.account is account, "a tree has two tenants"
            (used if node.pins else idle)[account] += len(node.pages)
    for lease in books.leases.values():
        used[lease.account] += len(lease.held_pages) + lease.promised_pages
        promised[lease.account] += lease.promised_pages
    for load in books.loads.values():
        used[load.tree.root.account] += len(load.pages)
    for account in accounts:
        assert used[account] == account.used_pages, f"{account.tenant} is charged for others"
        assert idle[account] == account.idle_pages
        assert promised[account] == account.promised_pages
        assert trees[account] == account.tree_count


def _check_pages(books: Books, tables: dict[int, U32]) -> None:
    """Every held or draining page has exactly one owner."""
    states = books.pool.states.tolist()
    owned: set[int] = set()

    def own(some: Pages, state: HeaderState) -> set[int]:
        pages = table_of(some).tolist()
        assert all(states[page] == state for page in pages), f"pages {pages} are not {state.name}"
        before = len(owned)
        owned.update(pages)
        assert len(owned) == before + len(pages), "two owners"
        return set(pages)

    for lease in books.leases.values():
        revoked = lease.life.state is LeaseState.REVOKED
        held = own(lease.held_pages, HeaderState.DRAINING if revoked else HeaderState.HELD)
        table = tables[lease.id].tolist()
        assert len(set(table)) == len(table) == lease.page_count, "a page twice in a table"
        writable = join_all(lease.writable).tolist()
        assert table[lease.committed_pages :] == writable, "the tail is not its own"
        path = set(books.forest.table(lease.anchor).tolist())
        assert path.issuperset(set(table) - held), "a lease reads pages that it does not pin"
    for load in books.loads.values():
        own(load.pages, HeaderState.HELD)
    for session in books.sessions.values():
        own(session.claimed, HeaderState.DRAINING)
        for pages in session.letting_go.values():
            own(pages, HeaderState.DRAINING)
    own(books.limbo, HeaderState.DRAINING)
    in_use = (HeaderState.HELD, HeaderState.DRAINING)
    wanted = {page for page, state in enumerate(states) if state in in_use}
    assert owned == wanted, "a held or draining page has no owner"
    live = books.pool.sequences[list(owned)]
    assert len(set(live.tolist())) == len(live), "two grants share a sequence"


def _check_leases(books: Books, tables: dict[int, U32]) -> None:
    size = books.facts.page_size
    slots = set(books.slots) | set(books.slots_kept)
    for lease in books.leases.values():
        state = lease.life.state
        assert state is not LeaseState.ENDED, "an ended lease is kept"
        assert lease.slot not in slots, "a used lease slot is free"
        slots.add(lease.slot)
        known, start = lease.known_tokens, lease.committed_pages * size
        assert lease.tokens_first % size == 0 and lease.tokens_first <= start <= known
        assert lease.filled_tokens <= min(known, lease.page_count * size)
        granted = int(books.pool.sequences[tables[lease.id]].max()) if lease.page_count else 0
        assert granted <= lease.granted_at <= books.pool.last_sequence, "its own pages are stale"
        assert (lease.id in books.revoked) == (state is LeaseState.REVOKED)
        assert state is LeaseState.REVOKED or not lease.order.place > books.youngest, (
            "not the youngest"
        )
        if state is LeaseState.OFFERED:
            assert books.tickets[lease.ticket].lease is lease
            continue
        session = books.sessions[lease.incarnation]
        assert session.leases[lease.id] is lease
        assert (session.by_key.get(lease.key) is lease) == (state is LeaseState.HELD)
        assert session.is_open or state is LeaseState.REVOKED, "a lease without a session"
    assert books.revoked.keys() <= books.leases.keys(), "a lease is over and revoked still"
    assert len(slots) == books.limits.lease_count_max, "a lease slot is lost"
    trees = [*books.forest.trees.values(), *books.forest.retired.values()]
    assert sum(tree.lease_count for tree in trees) == len(books.leases) + len(books.loads)
    assert sum(tree.pin_count for tree in trees) == len(books.pins)
    lines = len(books.root_lines.free) + len(books.root_lines.kept) + len(trees)
    assert lines == ROOT_COUNT_MAX, "a line of the root table is lost"
    assert all(tree.is_retired and not tree.pin_count for tree in books.forest.retired.values())
    held = sum(len(session.leases) for session in books.sessions.values())
    assert held + len(books.tickets) == len(books.leases), "a lease has no owner or two"


def _check_tickets(books: Books) -> None:
    for name, ticket in books.tickets.items():
        assert ticket.id == name and ticket.life.state is TicketState.OFFERED
        assert ticket.lease.life.state is LeaseState.OFFERED and ticket.lease.ticket == name
    assert all(t.life.state is not TicketState.OFFERED for t in books.closed.values())


def check_forest(forest: Forest, pool: PagePool, anchors: Iterable[Node]) -> None:
    """Raise ``AssertionError`` unless trees, pins, ledger and policy agree. ``anchors``: the node
    at which each lease, load and operator's pin ends."""
    width = forest._width
    pins: dict[Node, int] = {}
    for anchor in anchors:
        pins[anchor] = pins.get(anchor, 0) + 1
    seen = np.zeros(pool.total, bool)
    pinned = idle = 0
    idle_nodes = set()
    for tree in [*forest.trees.values(), *forest.retired.values()]:
        for node in [tree.root, *tree.root.below()]:
            wanted = pins.pop(node, 0) + sum(1 for c in node.children.values() if c.pins)
            assert node.pins == wanted, f"{node.pins} pins, {wanted} are accounted for"
            for key, child in node.children.items():
                assert child.parent is node and child.tokens[:width] == key
            if node.is_root:
                continue
            assert node.depth == node.parent.depth + len(node.pages)
            assert len(node.pages) and len(node.tokens) == len(node.pages) * width
            assert not seen[table_of(node.pages)].any(), "a page is in the tree twice"
            seen[table_of(node.pages)] = True
            if node.pins:
                pinned += len(node.pages)
            else:
                idle += len(node.pages)
                idle_nodes.add(node)
                above = node.parent
                assert above.pins or above.expires_ms >= node.expires_ms, "it outlives its prefix"
                assert node.expires_ms >= FOREVER_MS or forest.lifetimes.knows(node), "kept unseen"
    forest.lifetimes.check()
    assert not pins, "a lease is anchored outside the tree"
    assert (pool.pinned, pool.idle) == (pinned, idle), "ledger and tree differ"
    assert np.array_equal(seen, pool.states == HeaderState.COMMITTED), "a committed page is lost"
    idle_leaves = {node for node in idle_nodes if not node.children}
    assert UNLINKED.older is UNLINKED is UNLINKED.newer, "what is in no queue was linked"
    for account in forest.accounts:
        assert all(node.account is account for node in account.policy), "another's edge"
    found = {node for account in forest.accounts for node in account.policy}
    assert found == idle_leaves, "policy and tree differ"
