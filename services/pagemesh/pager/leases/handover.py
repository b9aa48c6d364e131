"""Handover of leases between workers (offers, tickets, redemption), and forks.

An offer moves ownership of the lease to the ticket. From then on the offerer neither writes nor
reads its pages, so whatever ends the ticket frees the lease at once. Redeeming gives the new
holder write access to the uncommitted pages under new ledger sequences, which fences off every
older view of them.
"""

from __future__ import annotations

import msgspec
import numpy as np

from pagemesh.pager.books import Books
from pagemesh.pager.leases.admission import Admission
from pagemesh.pager.leases.filling import Filling
from pagemesh.pager.leases.lease import NO_WATERFALL, Lease, Session, Ticket
from pagemesh.pager.leases.states import LeaseState, TicketState
from pagemesh.pager.pages.runs import first_of
from pagemesh.wire.errors import Busy, Gone, Malformed, NoCapacity, Stale, TicketOver
from pagemesh.wire.messages import Ok, SequenceKey
from pagemesh.wire.pager_messages import (
    CancelTicket,
    Fork,
    Forked,
    Granted,
    Handle,
    Offer,
    Offered,
    Redeem,
    TicketClosed,
    Withdraw,
)
from pagemesh.wire.tokens import PageCopy, unpack_extents

_FORGET = "forget it and go on without its lease"
_ANEW = "admit the sequence again"


class Handover:
    """Offers, redeems, withdraws and cancels tickets; forks leases."""

    def __init__(self, books: Books, filling: Filling, admission: Admission) -> None:
        self._books = books
        self._filling = filling
        self._admission = admission

    def offer(self, message: Offer) -> Offered:
        """Move a lease to a ticket. Raises ``Stale`` also for a late offer that was sent to an
        earlier pager: its lease has since been declared as held, and is in use."""
        books = self._books
        books.open_session(message.worker, message.incarnation, message.epoch)
        known = self._find(message.ticket)
        if known is not None:
            if known.offerer != message.incarnation or known.lease.id != message.lease:
                raise Malformed("the ticket id is in use: choose another")
            if known.life.state is not TicketState.OFFERED:
                raise Gone(f"the ticket is {known.life.state.value}: {_FORGET}")
            return Offered(ticket=known.id, handle=known.handle)
        lease = books.held_lease(message.worker, message.incarnation, message.lease, message.key)
        self._filling.require(lease, message.fill)
        if len(books.tickets) >= books.limits.ticket_count_max:
            raise Busy(
                f"{len(books.tickets)} tickets are open: offer again later, or continue on this "
                "worker",
                retry_after_ms=1_000,
            )
        self._filling.take(lease, message.fill)
        ttl_ms = min(message.ttl_ms, books.limits.ticket_ttl_ms_max)
        return self.open_ticket(lease, message.ticket, ttl_ms)

    def open_ticket(self, lease: Lease, ticket_id: str, ttl_ms: int) -> Offered:
        """Put a held lease under a new ticket."""
        books = self._books
        session = books.sessions[lease.incarnation]
        handle = Handle(
            host=books.facts.host,
            pool_incarnation=books.facts.incarnation,
            pool=books.facts.pool,
            group=books.facts.group,
            layout_digest=books.facts.layout_digest,
            lease=lease.id,
            granted_at=lease.granted_at,
            extents=lease.extents,
            token_count=lease.filled_tokens,
            ttl_ms=ttl_ms,
        )
        expires_ms = books.now_ms + ttl_ms
        ticket = Ticket(ticket_id, lease, session.incarnation, handle, expires_ms)
        lease.life.move(LeaseState.OFFERED, "offer")
        lease.ticket = ticket_id
        books.unhold(lease)
        books.break_promise(lease)
        books.in_flight.leave(lease)
        del session.leases[lease.id]
        books.tickets[ticket_id] = ticket
        return Offered(ticket=ticket_id, handle=handle)

    def redeem(self, message: Redeem) -> Granted:
        """Take over a ticket's lease, extended as far as there is room. Raises ``Gone`` when
        another worker has or wants it, ``TicketOver`` when nobody can have it any more, and
        ``Stale`` when the ticket is not known (yet)."""
        books = self._books
        session = books.open_session(message.worker, message.incarnation, message.epoch)
        ticket = self._find(message.ticket)
        if ticket is None:
            raise Stale(f"the ticket is unknown or too old: {_ANEW}")
        lease, state = ticket.lease, ticket.life.state
        if state is TicketState.REDEEMED and ticket.redeemer == message.incarnation:
            if session.by_key.get(lease.key) is lease:
                return lease.granted()
            raise TicketOver(f"the ticket was redeemed and its lease has ended: {_ANEW}")
        if state is TicketState.EXPIRED:
            raise TicketOver(f"the ticket has expired: {_ANEW}")
        if state is not TicketState.OFFERED:
            raise Gone(f"the ticket is {state.value}: {_FORGET}")
        self._require_same(message, ticket)
        if message.key in session.by_key:
            raise Stale("the sequence already holds another lease: release it first")
        self._close(ticket, TicketState.REDEEMED, "redeem")
        ticket.redeemer = message.incarnation
        lease.life.move(LeaseState.HELD, "redeem")
        books.hold(lease, session)
        lease.granted_ms = books.now_ms
        held = lease.held_pages
        books.write_held(held, books.pool.renumber(held), session.incarnation, lease.tree)
        lease.granted_at = books.pool.number()
        lease.cached_tokens, lease.waterfall = lease.filled_tokens, NO_WATERFALL
        self._grow(lease, message.reserve_tokens)
        return lease.granted()

    def withdraw(self, message: Withdraw) -> Ok:
        """Return the lease to its offerer. Raises ``Gone`` when another worker redeemed or
        cancelled it, ``Stale`` when nobody can have it any more."""
        books = self._books
        session = books.open_session(message.worker, message.incarnation, books.facts.epoch)
        ticket = self._find(message.ticket)
        if ticket is None or ticket.offerer != message.incarnation:
            raise Stale(f"this worker has no such ticket: {_ANEW}")
        lease = ticket.lease
        if ticket.withdrawn and session.by_key.get(lease.key) is lease:
            return Ok()
        if ticket.withdrawn or ticket.life.state is TicketState.EXPIRED:
            raise Stale(f"the ticket's lease has ended: {_ANEW}")
        if ticket.life.state is not TicketState.OFFERED:
            raise Gone(f"the ticket is {ticket.life.state.value}: {_FORGET}")
        if lease.key in session.by_key:
            raise Stale("the sequence already holds another lease: release it first")
        self._close(ticket, TicketState.CANCELLED, "withdraw", tell=False)
        ticket.withdrawn = True
        lease.life.move(LeaseState.HELD, "withdraw")
        books.hold(lease, session)
        return Ok()

    def cancel(self, message: CancelTicket) -> Ok:
        """End a ticket whose lease nobody wants. Raises ``Gone`` when the ticket is unknown,
        withdrawn, or redeemed by another worker."""
        books = self._books
        books.open_session(message.worker, message.incarnation, books.facts.epoch)
        ticket = self._find(message.ticket)
        if ticket is None or ticket.withdrawn:
            raise Gone(
                "the ticket is unknown, too old or withdrawn: release its lease if you hold it"
            )
        match ticket.life.state:
            case TicketState.OFFERED:
                self.close_and_end(ticket, TicketState.CANCELLED, "cancel")
            case TicketState.REDEEMED if ticket.redeemer != message.incarnation:
                raise Gone(f"another worker redeemed the ticket: {_FORGET}")
            case TicketState.REDEEMED if ticket.lease.life.state is LeaseState.HELD:
                if ticket.lease.incarnation != message.incarnation:  # it was offered again since
                    raise Gone(f"another worker now holds the ticket's lease: {_FORGET}")
                # The reply to Redeem may be lost, so the holder may not know: have it confirm.
                books.revoke(ticket.lease, "stale")
            case _:
                pass
        return Ok()

    def close_offer(self, lease: Lease) -> None:
        """End an offered lease that is preempted, and its ticket."""
        self.close_and_end(self._books.tickets[lease.ticket], TicketState.EXPIRED, "preempted")

    def expire(self) -> None:
        """End the tickets that have expired."""
        now_ms = self._books.now_ms
        for ticket in [t for t in self._books.tickets.values() if t.expires_ms <= now_ms]:
            self.close_and_end(ticket, TicketState.EXPIRED, "ttl")

    def close_and_end(self, ticket: Ticket, state: TicketState, why: str) -> None:
        """Close an open ticket and free its lease: it has no reader and no writer."""
        self._close(ticket, state, why)
        self._books.end(ticket.lease, why)

    def tell_closed(self, ticket: Ticket) -> None:
        """Tell the offerer, if it is still alive, what became of its offer."""
        session = self._books.sessions.get(ticket.offerer)
        if session is None or not session.worker:
            return
        match ticket.life.state:
            case TicketState.REDEEMED:
                closed = TicketClosed(ticket=ticket.id, outcome="redeemed")
            case TicketState.CANCELLED:
                closed = TicketClosed(ticket=ticket.id, outcome="cancelled")
            case _:
                closed = TicketClosed(ticket=ticket.id, outcome="expired")
        self._books.notify(session.worker, closed)

    # Forks

    def fork(self, message: Fork) -> Forked:
        """Grant leases to ``children`` over the same filled slots, to all or to none. Raises
        ``NoCapacity``, ``Gone``, ``Stale`` or ``Malformed``."""
        books, filling = self._books, self._filling
        lease = books.held_lease(message.worker, message.incarnation, message.lease, message.key)
        session = books.sessions[message.incarnation]
        there = [session.by_key.get(key) for key in message.children]
        if there and all(c is not None and c.forked_from == lease.id for c in there):
            return self._forked(lease, [c for c in there if c is not None])
        filling.require(lease, message.fill)
        if any(there) or len({lease.key, *message.children}) <= len(message.children):
            raise Malformed(
                "a child is named twice or already holds a lease: name each child without a "
                "lease once"
            )
        if any(key.request != lease.key.request for key in message.children):
            raise Malformed("a child belongs to another request: fork only choices of this one")
        filled = message.fill.filled_tokens
        if message.reserve_tokens < filled:
            raise Malformed(
                "reserve_tokens is less than the filled slots: reserve at least as many"
            )
        if filled < lease.filled_tokens:
            raise Stale(
                f"{filled} slots to fork, but {lease.filled_tokens} are filled: fork all of them"
            )
        shared = filled // books.facts.page_size
        each = books.facts.pages_for(message.reserve_tokens) - shared
        need = each * len(message.children)
        if len(books.slots) < len(message.children):
            raise NoCapacity(
                f"too many leases are open for {len(message.children)} more: ask again later",
                retry_after_ms=books.limits.ask_again_ms,
            )
        pinned = filling.pinned_by(lease, message.fill)
        waits = self._admission.older_waits(lease.order, lease.key, lease.incarnation)
        room = books.room - (pinned if books.may_evict() else 0)
        room = min(room, self._admission.quota_room(lease) - pinned)
        if need > room or waits:
            raise NoCapacity(
                f"{len(message.children)} children need {need} pages, {room} are "
                f"available{' and older sequences wait' if waits else ''}: ask again later, or "
                "admit each child, which reuses the cached prompt",
                retry_after_ms=books.limits.ask_again_ms,
            )
        filling.take(lease, message.fill)
        children = [self._fork_one(lease, key, filled, each, session) for key in message.children]
        return self._forked(lease, children)

    def _fork_one(
        self, parent: Lease, key: SequenceKey, filled: int, count: int, session: Session
    ) -> Lease:
        books = self._books
        books.forest.pin(parent.anchor)
        fresh = books.take_pages(count, session.incarnation, parent.tree)
        shared = parent.committed_pages
        order = msgspec.structs.replace(parent.order, choice=key.choice)
        start = shared * books.facts.page_size
        known = parent.known_from(start)[: 4 * (filled - start)]
        child = self._admission.start_lease(
            key, order, parent.tree, parent.anchor, fresh, known, start, filled, NO_WATERFALL,
            max(parent.tokens_max, parent.page_count * books.facts.page_size),
        )  # fmt: skip
        # The holder copies the partly filled page, which counts as filled once it says so.
        child.filled_tokens = start
        child.forked_from, child.ttl_ms = parent.id, parent.ttl_ms
        if known:
            child.copied = (
                PageCopy(source_page=first_of(parent.writable[0]), target_page=first_of(fresh[0])),
            )
        books.hold(child, session)
        return child

    def _forked(self, lease: Lease, children: list[Lease]) -> Forked:
        return Forked(
            lease=lease.id,
            children=[child.granted() for child in children],
            copies=[copy for child in children for copy in child.copied],
        )

    # Tickets

    def _find(self, ticket_id: str) -> Ticket | None:
        return self._books.tickets.get(ticket_id) or self._books.closed.get(ticket_id)

    def _close(self, ticket: Ticket, state: TicketState, why: str, *, tell: bool = True) -> None:
        books = self._books
        ticket.life.move(state, why)
        ticket.lease.ticket = ""
        del books.tickets[ticket.id]
        books.closed[ticket.id] = ticket
        if len(books.closed) > books.limits.ended_count_max:
            books.closed.popitem(last=False)
        if tell:
            self.tell_closed(ticket)

    def _require_same(self, message: Redeem, ticket: Ticket) -> None:
        ours, theirs = ticket.handle, message.handle
        if message.key != ticket.lease.key:
            raise Malformed(
                "the ticket belongs to another sequence: name the one it was offered for"
            )
        if (theirs.pool_incarnation, theirs.layout_digest) != (
            ours.pool_incarnation,
            ours.layout_digest,
        ):
            raise Stale(f"the handle belongs to another pool: {_ANEW}")
        if (theirs.lease, theirs.granted_at, theirs.token_count) != (
            ours.lease,
            ours.granted_at,
            ours.token_count,
        ) or not self._same_pages(theirs.extents, ours.extents):
            raise Stale(f"the handle is not the one that was offered: {_ANEW}")

    def _same_pages(self, some: bytes, others: bytes) -> bool:
        """Whether both are the same page table. After a pager restart, the pager has it packed as
        the worker packs it, so the bytes may differ."""
        count = self._books.facts.page_count
        return some == others or np.array_equal(
            unpack_extents(some, page_count_max=count), unpack_extents(others, page_count_max=count)
        )

    def _grow(self, lease: Lease, reserve_tokens: int) -> None:
        books = self._books
        wanted = books.facts.pages_for(reserve_tokens) - lease.page_count
        if not self._admission.older_waits(lease.order, lease.key, lease.incarnation):
            room = min(books.room, self._admission.quota_room(lease))
            self._admission.lengthen(lease, min(wanted, room))
