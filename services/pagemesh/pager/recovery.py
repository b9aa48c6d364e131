"""A pager's second life: ledger and tree from page headers, leases from declarations.

    header                        in the new ledger
    FREE                          free
    COMMITTED, its chain whole    idle, in the tree, until the time in the header
    HELD or DRAINING              draining, claimed by its writer while it lives; else free
    torn, or its chain broken     draining in limbo while any holder lives; else free

``regrow`` rebuilds the tree from the headers.

Workers that were alive at the restart may still read committed pages that no lease of the new
ledger pins, so nothing is evicted until each of them has declared what it holds, or is proven dead.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.books import Books
from pagemesh.pager.events import HeaderTable, PagesStored, Recovered
from pagemesh.pager.leases.admission import Admission
from pagemesh.pager.leases.handover import Handover
from pagemesh.pager.leases.lease import Declaration, Lease, Lifecycle, Session
from pagemesh.pager.leases.sessions import Sessions
from pagemesh.pager.leases.states import SESSION_MOVES, LeaseState, SessionState, TicketState
from pagemesh.pager.leases.waiting import require_own
from pagemesh.pager.pages.runs import last, part, run_of, table_of, where
from pagemesh.pager.regrow import by_last_use, regrow
from pagemesh.pager.retention.giving_up import is_given_up
from pagemesh.pager.retention.pins import Pins
from pagemesh.pager.retention.retiring import Retiring
from pagemesh.pager.retention.roots import tree_of
from pagemesh.wire.errors import Malformed, Stale
from pagemesh.wire.messages import Message, Ok
from pagemesh.wire.pager_messages import Declare, Declared, HeldLease
from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import EMPTY, U32, unpack, unpack_extents


class Recovery:
    """Rebuilds the books at the start; handles declarations then and later."""

    def __init__(
        self,
        books: Books,
        admission: Admission,
        handover: Handover,
        sessions: Sessions,
        pins: Pins,
        retiring: Retiring,
    ) -> None:
        self._books = books
        self._pins = pins
        self._retiring = retiring
        self._admission = admission
        self._handover = handover
        self._sessions = sessions

    # The start

    def recover(self, event: Recovered) -> None:
        """Take over what an earlier life left. Raises ``AssertionError`` if this is not the first
        event, or if ledger numbers would go backwards."""
        books, headers = self._books, event.headers
        assert not books.sessions and books.pool.free == books.pool.total, "recovered too late"
        newest = max(int(headers.sequences.max()), int(headers.identities.max()))
        assert newest <= books.pool.last_sequence, "ledger numbers would go backwards"
        for holder in event.holders:
            session = Session(
                holder.incarnation, holder.worker, holder.lock_name, 0,
                Lifecycle(SESSION_MOVES, SessionState.SILENT, "restart"),
            )  # fmt: skip
            session.probed_ms = session.since_ms = books.now_ms
            books.sessions[holder.incarnation] = session
            books.unsettled.add(holder.incarnation)
        self._adopt_roots(event)
        books.root_lines.adopt(headers)
        edges = regrow(books.forest, headers, books.facts.page_size)
        states = np.zeros(books.pool.total, np.uint8)
        for edge in edges:
            states[where(edge.node.pages)] = HeaderState.COMMITTED
        used = (headers.states != HeaderState.FREE) & (states != HeaderState.COMMITTED)
        self._claim(headers, used, states)
        books.pool.sequences[:] = headers.sequences
        books.pool.identities[:] = headers.identities
        books.pool.adopt(states)
        books.forest.rest(by_last_use(edges))
        freed = np.flatnonzero((headers.states != HeaderState.FREE) & (states == HeaderState.FREE))
        books.set_states(run_of(freed.astype(np.uint32)), HeaderState.FREE)
        books.slots_kept = {
            int(slot): int(event.lease_words[slot])
            for slot in np.flatnonzero(event.lease_words[: books.limits.lease_count_max])
        }
        books.slots = array("I", (one for one in books.slots if one not in books.slots_kept))
        for edge in edges:
            node = edge.node
            books.late.append(
                PagesStored(edge.tree.digest, last(node.parent.pages), node.pages, node.tokens)
            )
        self._pins.restore(event.pins, edges)  # last: it splits edges
        books.settle()

    def _adopt_roots(self, event: Recovered) -> None:
        books = self._books
        for root in event.roots:
            if root.live and root.digest not in books.forest.trees:
                books.forest.plant(root.digest, root.index)
                books.root_lines.free.remove(root.index)

    def _claim(
        self, headers: HeaderTable, used: NDArray[np.bool_], states: NDArray[np.uint8]
    ) -> None:
        """Leave pages draining that a living worker may still write or read."""
        books = self._books
        held = used & (
            (headers.states == HeaderState.HELD) | (headers.states == HeaderState.DRAINING)
        )
        pages = np.flatnonzero(held).astype(np.uint32)
        writers = headers.writers[pages]
        for session in books.sessions.values():
            session.claimed = pages[writers == session.incarnation]
            states[session.claimed] = HeaderState.DRAINING
        if books.unsettled:
            books.limbo = np.flatnonzero(used & ~held).astype(np.uint32)
            states[books.limbo] = HeaderState.DRAINING

    # Declarations

    def declare(self, message: Declare) -> Message:
        """Process one part of a declaration right away, so that a long one does not hold up others.
        After the last part to come, leases that no part named are over."""
        books = self._books
        session = books.open_session(message.worker, message.incarnation, message.epoch)
        if message.part >= message.parts:
            raise Malformed(
                f"part {message.part} of {message.parts} does not exist: count parts from 0"
            )
        if message.parts > books.limits.declare_parts_max:
            raise Malformed(
                f"{message.parts} parts exceed the limit of {books.limits.declare_parts_max}: "
                "send larger parts"
            )
        for held in message.leases:
            require_own(held.order, held.key)
            unpack(held.tokens)
            unpack_extents(held.extents, page_count_max=books.facts.page_count)
        begun = session.declaring
        newest = session.declared_number + 1 if begun is None else begun.number
        if message.number < newest:
            raise Stale(f"declaration {message.number} has been replaced: go on with the later one")
        if begun is None or begun.number != message.number:
            begun = Declaration(message.number, books.now_ms)
        if message.part not in begun.parts:
            if begun.line_count + len(message.leases) > books.limits.declare_leases_max:
                raise Malformed(
                    f"more than {books.limits.declare_leases_max} leases are declared: name "
                    "each only once"
                )
            begun.parts.add(message.part)
            self._take_up(session, begun, message.leases)
        session.declaring = begun
        session.expires_ms = books.now_ms + books.limits.session_ttl_ms
        if len(begun.parts) < message.parts:
            return Ok()
        session.declaring, session.declared_number = None, message.number
        self._conclude(session, begun)
        return Declared(lost=begun.lost)

    def _take_up(self, session: Session, begun: Declaration, lines: list[HeldLease]) -> None:
        """Confirm the leases that a part names, or list them as lost."""
        books = self._books
        lost = [held for held in lines if not self._confirm(session, held)]
        begun.named.update(held.lease for held in lines)
        begun.lost += [held.lease for held in lost]
        begun.line_count += len(lines)
        if session.incarnation in books.unsettled:
            # Pages of restored leases are held now: they are no longer claimed, or in limbo.
            session.claimed = self._draining_of(session.claimed)
            books.limbo = self._draining_of(books.limbo)
            self._keep_from(session, lost)

    def _conclude(self, session: Session, whole: Declaration) -> None:
        """All parts are processed: end the other leases that the books have for ``session``."""
        books = self._books
        for lease_id in [one for one in session.letting_go if one not in whole.named]:
            books.let_go(session, lease_id)  # released before the worker heard of the loss
        for lease in list(session.leases.values()):
            age_ms = whole.since_ms - lease.granted_ms
            if (
                lease.id not in whole.named
                and lease.life.state is LeaseState.HELD
                and age_ms >= books.limits.declare_grace_ms
            ):
                books.revoke(lease, "stale")
        if session.incarnation in books.unsettled:
            books.free_claimed(session)
            books.unsettled.discard(session.incarnation)
            books.settle()

    def _draining_of(self, pages: U32) -> U32:
        draining: U32 = pages[self._books.pool.states[pages] == HeaderState.DRAINING]
        return draining

    def _keep_from(self, session: Session, lost: list[HeldLease]) -> None:
        """Keep the pages of lost leases draining, since a running step may still write them, until
        the worker says that it has let go of each. (An offered lease has no writer.)"""
        claimed, kept = session.claimed, np.zeros(len(session.claimed), bool)
        for held in lost:
            if held.ticket is None:
                pages = unpack_extents(held.extents, page_count_max=self._books.facts.page_count)
                at = np.unique(_places(claimed, pages))
                at = at[~kept[at]]
                kept[at] = True
                before = session.letting_go.get(held.lease, EMPTY)  # if it is named twice
                session.letting_go[held.lease] = np.concatenate([before, claimed[at]])
        session.claimed = claimed[~kept]

    def _confirm(self, session: Session, held: HeldLease) -> bool:
        """Whether the worker still has the lease ``held``, which is restored if need be."""
        books = self._books
        lease = books.leases.get(held.lease)
        if lease is None and session.incarnation in books.unsettled:
            closed = books.closed.get(held.ticket) if held.ticket is not None else None
            if closed is None or closed.lease.id != held.lease:
                return self._restore(session, held)  # else restored by one that broke off
        if held.ticket is not None:
            return self._confirm_offer(session, held, lease)
        if lease is None or lease.incarnation != session.incarnation:
            return False
        # If it is revoked, its Revoke says so, and is repeated until acknowledged.
        return lease.life.state in (LeaseState.HELD, LeaseState.REVOKED)

    def _confirm_offer(self, session: Session, held: HeldLease, lease: Lease | None) -> bool:
        books = self._books
        assert held.ticket is not None
        ticket = books.tickets.get(held.ticket) or books.closed.get(held.ticket)
        if ticket is None or ticket.withdrawn:
            # Its Offer is on its way here, or our answer to its Withdraw: is the lease held?
            return lease is not None and session.by_key.get(lease.key) is lease
        if ticket.offerer == session.incarnation and ticket.life.state is not TicketState.OFFERED:
            self._handover.tell_closed(ticket)
        return True

    def _restore(self, session: Session, held: HeldLease) -> bool:
        """Restore a lease of an earlier life, and return True, if all of it is still valid."""
        books = self._books
        pages = unpack_extents(held.extents, page_count_max=books.facts.page_count)
        size, filled = books.facts.page_size, len(held.tokens) // 4
        if (
            books.slots_kept.get(held.lease_slot) != held.lease
            or held.key in session.by_key
            or held.ticket in books.tickets
            or held.ticket in books.closed
            or filled > len(pages) * size
            or not len(pages)
            or int(pages.max()) >= books.pool.total
            or len(pages) + held.promised_pages > books.pool.total
            or len(np.unique(pages)) != len(pages)
            or int(books.pool.sequences[pages].max()) > held.granted_at
            or held.granted_at > books.pool.last_sequence
            or self._retiring.meant(held.root, pages)
            or is_given_up(books, pages)
        ):
            return False
        tree = tree_of(books, held.root, held.terms)
        if not tree.model:  # provisional, until an admission
            tree.model, tree.terms = session.model, held.terms
        match = books.forest.match(tree.root, held.tokens, filled // size, is_over_too=True)
        above = books.forest.table(match.node)
        path = np.concatenate([above, table_of(part(match.edge.pages, 0, match.edge_pages))])
        shared = np.zeros(len(pages), bool)
        shared[: len(path)] = pages[: len(path)] == path
        own = pages[~shared]
        known = len(_places(session.claimed, own)) + len(_places(books.limbo, own))
        if known != len(own) or (books.pool.states[own] != HeaderState.DRAINING).any():
            return False
        anchor = books.forest.pin_match(match)
        books.pool.resume(own)
        books.write_held(own, books.pool.sequences_of(own), session.incarnation, tree)
        del books.slots_kept[held.lease_slot]
        lease = Lease(
            id=held.lease, slot=held.lease_slot, key=held.key, order=held.order, tree=tree,
            anchor=anchor, extents=held.extents, page_count=len(pages),
            writable=[pages[len(path) :]], granted_at=held.granted_at, granted_ms=books.now_ms,
        )  # fmt: skip
        lease.incarnation = session.incarnation
        lease.tokens, lease.tokens_max, lease.trace = held.tokens, held.tokens_max, held.trace
        lease.cached_tokens = lease.filled_tokens = filled
        lease.ttl_ms = 1_000 * held.terms.ttl_s
        if len(path) == len(pages):
            lease.writable.clear()  # no part is empty
        copies = pages[: len(path)][~shared[: len(path)]]
        if len(copies):
            lease.copies.append(copies)
        books.enter(lease)
        books.hold(lease, session)
        if held.promised_pages:
            books.promises.give(lease, held.promised_pages)
        if held.ticket is not None:
            self._handover.open_ticket(lease, held.ticket, books.limits.ticket_ttl_ms_max)
        return True


def _places(claimed: U32, pages: U32) -> NDArray[np.intp]:
    """The indexes in ``claimed`` (ascending) of those ``pages`` that are in it."""
    if not len(claimed):
        return np.empty(0, np.intp)
    at = np.searchsorted(claimed, pages)
    at[at == len(claimed)] = 0
    found: NDArray[np.intp] = at[claimed[at] == pages]
    return found
