"""The pager's account of itself: the report others read, and the check tests make."""

from __future__ import annotations

import numpy as np

from pagemesh.pager.books import Books
from pagemesh.pager.lease import Lease, LeaseState, TicketState
from pagemesh.pager.radix import check_forest
from pagemesh.wire.pager_reports import LeaseLine, PagerReport
from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import U32

_LINES_MAX = 4_096


def report(books: Books) -> PagerReport:
    """Ledger, counters and (at most 4,096) leases."""
    pool, facts = books.pool, books.facts
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
        ticket_count=len(books.tickets),
        waiter_count=len(books.waiting),
        leases=[_line(books, lease) for lease in list(books.leases.values())[:_LINES_MAX]],
    )


def _line(books: Books, lease: Lease) -> LeaseLine:
    session = books.sessions.get(lease.incarnation)
    worker = session.worker if session is not None and session.worker else "?"
    return LeaseLine(
        lease=lease.id,
        key=lease.key,
        owner=f"ticket of {worker}" if lease.ticket else worker,
        state=lease.life.state.value,
        page_count=len(lease.pages),
        filled_tokens=lease.filled_tokens,
    )


def check_books(books: Books) -> None:
    """Raise ``AssertionError`` when any two of the books' tables disagree."""
    books.pool.check()
    check_forest(books.forest, books.pool, books.anchors())
    books.waiting.check()
    _check_pages(books)
    _check_leases(books)
    _check_tickets(books)
    for session in books.sessions.values():
        assert books.sessions[session.incarnation] is session
    for waiter in books.waiting:
        session = books.sessions[waiter.message.incarnation]
        assert session.is_open, "a waiter without a session"


def _check_pages(books: Books) -> None:
    """Every held or draining page has exactly one owner."""
    states = books.pool.states
    owned = np.zeros(books.pool.total, bool)

    def own(pages: U32, state: HeaderState) -> None:
        assert (states[pages] == state).all(), f"pages {pages} are not {state.name}"
        assert not owned[pages].any() and len(np.unique(pages)) == len(pages), "two owners"
        owned[pages] = True

    for lease in books.leases.values():
        revoked = lease.life.state is LeaseState.REVOKED
        own(lease.held_pages, HeaderState.DRAINING if revoked else HeaderState.HELD)
        assert len(np.unique(lease.pages)) == len(lease.pages), "a page twice in a table"
        shared = np.setdiff1d(lease.pages, lease.held_pages)
        path = books.forest.table(lease.anchor)
        assert np.isin(shared, path).all(), "a lease reads pages that it does not pin"
    for session in books.sessions.values():
        own(session.claimed, HeaderState.DRAINING)
        for pages in session.letting_go.values():
            own(pages, HeaderState.DRAINING)
    own(books.limbo, HeaderState.DRAINING)
    wanted = (states == HeaderState.HELD) | (states == HeaderState.DRAINING)
    assert np.array_equal(owned, wanted), "a held or draining page has no owner"
    live = books.pool.sequences[owned]
    assert len(np.unique(live)) == len(live), "two grants share a sequence"


def _check_leases(books: Books) -> None:
    size = books.facts.page_size
    slots = set(books.slots) | set(books.slots_kept)
    for lease in books.leases.values():
        state = lease.life.state
        assert state is not LeaseState.ENDED, "an ended lease is kept"
        assert lease.slot not in slots, "a used lease slot is free"
        slots.add(lease.slot)
        known = lease.committed_pages * size + len(lease.tokens) // 4
        assert lease.filled_tokens <= min(known, len(lease.pages) * size)
        granted = int(books.pool.sequences[lease.pages].max()) if len(lease.pages) else 0
        assert granted <= lease.granted_at <= books.pool.last_sequence, "its own pages are stale"
        if state is LeaseState.OFFERED:
            assert books.tickets[lease.ticket].lease is lease
            continue
        session = books.sessions[lease.incarnation]
        assert session.leases[lease.id] is lease
        assert (session.by_key.get(lease.key) is lease) == (state is LeaseState.HELD)
        assert session.is_open or state is LeaseState.REVOKED, "a lease without a session"
    assert len(slots) == books.limits.lease_count_max, "a lease slot is lost"
    counted = sum(tree.lease_count for tree in books.forest.trees.values())
    assert counted == len(books.leases)
    held = sum(len(session.leases) for session in books.sessions.values())
    assert held + len(books.tickets) == len(books.leases), "a lease has no owner or two"


def _check_tickets(books: Books) -> None:
    for name, ticket in books.tickets.items():
        assert ticket.id == name and ticket.life.state is TicketState.OFFERED
        assert ticket.lease.life.state is LeaseState.OFFERED and ticket.lease.ticket == name
    assert all(t.life.state is not TicketState.OFFERED for t in books.closed.values())
