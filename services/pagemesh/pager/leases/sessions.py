"""Sessions: which workers may hold leases, whether their view agrees with ours, and who is gone.

A session ends by silence (``EXPIRED``) or by proof that its process is gone (its lock is free).
Its writable pages can be reused only after that proof or an acknowledgement.
"""

from __future__ import annotations

from functools import reduce
from operator import xor

from pagemesh.pager.books import Books
from pagemesh.pager.events import ForgetHolder, Holder, KillHolder, ProbeHolder, RememberHolder
from pagemesh.pager.leases.lease import Lifecycle, Session
from pagemesh.pager.leases.states import SESSION_MOVES, LeaseState, SessionState
from pagemesh.pager.limits import PoolFacts
from pagemesh.wire.errors import Busy, Malformed, Stale
from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import (
    AckRevoke,
    DeclareWanted,
    Heartbeat,
    OpenSession,
    PoolSpec,
    SessionOpened,
)

_MISMATCHES_MAX = 2


def _shape(pages: PoolSpec | PoolFacts) -> str:
    digest = pages.layout_digest.hex()
    return f"{pages.page_size} tokens in {pages.page_bytes} bytes (layout {digest})"


class Sessions:
    """Opens sessions, keeps them alive, expires them, and removes those of dead workers."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._ticked_ms = 0

    def open(self, message: OpenSession) -> SessionOpened:
        """Start (or confirm) the session of a worker incarnation. Raises ``Stale`` when its pages
        differ from the pool's, ``Busy`` when too many sessions are known, and ``Malformed``."""
        books, facts = self._books, self._books.facts
        if message.pool.layout_digest != facts.layout_digest:
            raise Stale(
                f"the pool's pages are {_shape(facts)}, this worker's are "
                f"{_shape(message.pool)}: its model, --kv-dtype or --page-size differs"
            )
        if (message.pool.page_size, message.pool.page_bytes) != (
            facts.page_size,
            facts.page_bytes,
        ):
            raise Malformed("page size or page bytes differ although the layout digest is the same")
        if message.pool.place != facts.place:
            here, there = (place or "host memory" for place in (facts.place, message.pool.place))
            raise Stale(f"the pool's pages are in {here}, yours would be in {there}")
        session = books.sessions.get(message.incarnation)
        if session is None:
            if len(books.sessions) >= books.limits.session_count_max:
                raise Busy(
                    f"too many sessions are known ({len(books.sessions)})", retry_after_ms=1_000
                )
            session = Session(
                message.incarnation, message.worker, message.lock_name, 0,
                Lifecycle(SESSION_MOVES, SessionState.OPEN, "open"),
            )  # fmt: skip
        elif session.worker and session.worker != message.worker:
            raise Malformed(f"incarnation {message.incarnation} belongs to {session.worker}")
        elif not session.is_open:
            session.life.move(SessionState.OPEN, "open")
        self._replace(message.worker, session)
        session.worker, session.lock_name = message.worker, message.lock_name
        session.model = message.model
        session.expires_ms = books.now_ms + books.limits.session_ttl_ms
        session.since_ms = books.now_ms
        books.sessions[message.incarnation] = session
        books.by_worker[message.worker] = session
        holder = Holder(message.incarnation, message.worker, message.lock_name)
        books.out.append(RememberHolder(holder))
        return SessionOpened(
            host=facts.host,
            epoch=facts.epoch,
            pool_incarnation=facts.incarnation,
            pool=facts.pool,
            pool_path=facts.path,
            page_count=facts.page_count,
            session_ttl_ms=books.limits.session_ttl_ms,
            heartbeat_ms=books.limits.heartbeat_ms,
        )

    def heartbeat(self, message: Heartbeat) -> Ok | DeclareWanted:
        """Keep the session alive, and compare the held leases (not those offered or revoked). A
        declaration is asked for only when they differ twice in a row, because grants and releases
        in transit cause harmless differences. Raises ``Stale``."""
        books = self._books
        session = books.open_session(message.worker, message.incarnation, message.epoch)
        session.expires_ms = books.now_ms + books.limits.session_ttl_ms
        ids = [lease.id for lease in session.by_key.values()]
        same = (len(ids), reduce(xor, ids, 0)) == (message.lease_count, message.lease_digest)
        session.mismatch_count = 0 if same else session.mismatch_count + 1
        unsettled = message.incarnation in books.unsettled
        if unsettled or session.mismatch_count >= _MISMATCHES_MAX:
            session.mismatch_count = 0
            return DeclareWanted(epoch=books.facts.epoch)
        return Ok()

    def acknowledge(self, message: AckRevoke) -> Ok:
        """The holder has let go of revoked leases."""
        books = self._books
        for lease_id in message.leases:
            lease = books.leases.get(lease_id)
            if (
                lease is not None
                and lease.incarnation == message.incarnation
                and lease.life.state is LeaseState.REVOKED
            ):
                books.end(lease, "acknowledged")
        session = books.sessions.get(message.incarnation)
        if session is not None:
            for lease_id in message.leases:
                books.let_go(session, lease_id)
            self.forget_if_over(session)
        return Ok()

    def was_away(self, away_ms: int) -> None:
        """Extend deadlines by ``away_ms``, in which nobody could be heard: it counts as nobody's
        silence. Tickets are extended by the part since the last tick only; otherwise a bus that
        fails again and again would keep them open for ever."""
        books = self._books
        since_ms, self._ticked_ms = books.now_ms - self._ticked_ms, books.now_ms
        if not away_ms:
            return
        for session in books.sessions.values():
            latest_ms = books.now_ms + books.limits.session_ttl_ms
            session.expires_ms = min(session.expires_ms + away_ms, latest_ms)
            session.since_ms = min(session.since_ms + away_ms, books.now_ms)
        for lease in books.revoked.values():
            lease.revoked_ms = min(lease.revoked_ms + away_ms, books.now_ms)
        forget_ms = books.now_ms + 2 * books.limits.ask_again_ms
        books.waiting.was_away(away_ms, forget_ms)
        books.in_flight.was_away(away_ms, books.now_ms, forget_ms)
        for ticket in books.tickets.values():
            latest_ms = books.now_ms + books.limits.ticket_ttl_ms_max
            ticket.expires_ms = min(ticket.expires_ms + min(away_ms, since_ms), latest_ms)

    def expire(self) -> None:
        """End sessions that fell silent."""
        now_ms = self._books.now_ms
        for session in list(self._books.sessions.values()):
            if session.is_open and session.expires_ms <= now_ms:
                self._lapse(session)

    def bury(self, incarnation: int) -> None:
        """End everything of a process that is proven dead, and so neither reads nor writes."""
        books = self._books
        session = books.sessions.get(incarnation)
        if session is not None:
            session.worker = ""  # nobody to tell
            books.forget_waiters(incarnation)
            for lease in list(session.leases.values()):
                books.end(lease, "death")
            books.free_claimed(session)
            for lease_id in list(session.letting_go):
                books.let_go(session, lease_id)
            self._remove(session, "death")
        books.unsettled.discard(incarnation)
        books.settle()

    def chase(self) -> None:
        """On a tick: repeat revocations, probe workers that owe pages and those whose prefixes
        others wait for, and kill those that keep owing pages that others wait for."""
        books, limits = self._books, self._books.limits
        revoked_ms: dict[int, int] = {}
        for lease in books.revoked.values():
            if books.now_ms - lease.notified_ms >= limits.revoke_again_ms:
                books.notify_revoked(lease, lease.reason)
            first_ms = revoked_ms.get(lease.incarnation, lease.revoked_ms)
            revoked_ms[lease.incarnation] = min(first_ms, lease.revoked_ms)
        awaited = books.in_flight.awaited
        for session in list(books.sessions.values()):
            self.forget_if_over(session)
            if session.incarnation not in books.sessions:
                continue
            since_ms = self._unresponsive_since_ms(session, revoked_ms)
            if since_ms is None and session.incarnation not in awaited:
                continue
            if books.now_ms - session.probed_ms < limits.probe_again_ms:
                continue
            session.probed_ms = books.now_ms
            overdue = since_ms is not None and self._is_overdue(session, since_ms)
            if overdue and self._is_in_the_way(session):
                books.out.append(KillHolder(session.incarnation))
            books.out.append(ProbeHolder(session.incarnation))

    def forget_if_over(self, session: Session) -> None:
        """Drop the record of an expired session that uses no page of the pool and fills none.
        Others are kept, since the next pager must know which workers may still touch pages."""
        books = self._books
        if session.life.state is not SessionState.EXPIRED or not session.is_empty:
            return
        fills = any(load.incarnation == session.incarnation for load in books.loads.values())
        if session.incarnation not in books.unsettled and not fills:
            self._remove(session, "nothing held")

    def _unresponsive_since_ms(self, session: Session, revoked_ms: dict[int, int]) -> int | None:
        """Since when the session owes pages, or None when it owes none. ``revoked_ms``: when the
        first of its still revoked leases was revoked, by incarnation."""
        owing = []
        if session.incarnation in revoked_ms:
            owing.append(revoked_ms[session.incarnation])
        unsettled = session.incarnation in self._books.unsettled
        if not session.is_open or unsettled or session.letting_go:
            owing.append(session.since_ms)
        return min(owing) if owing else None

    def _is_overdue(self, session: Session, since_ms: int) -> bool:
        """Whether ``session``, which has owed pages since ``since_ms``, should have let go by now.
        A worker that sends heartbeats lets go when its step ends, and ends itself if the step
        takes too long. A silent worker is frozen or dead, whatever it was computing before."""
        now_ms, limits = self._books.now_ms, self._books.limits
        if session.is_open:
            return now_ms - since_ms >= limits.busy_drain_ms_max
        heard_ms = session.expires_ms - limits.session_ttl_ms
        return now_ms - max(since_ms, heard_ms) >= limits.drain_ms_max

    def _is_in_the_way(self, session: Session) -> bool:
        """Whether a sequence waits for what ``session`` owes: for room in the pool, or in its
        tenant's quota, against which revoked leases still count."""
        if len(self._books.waiting):
            return True
        owed = (one for one in session.leases.values() if one.life.state is LeaseState.REVOKED)
        return any(len(lease.account.waiting) for lease in owed)

    def _replace(self, worker: str, session: Session) -> None:
        before = self._books.by_worker.get(worker)
        if before is not None and before is not session and before.is_open:
            self._lapse(before)  # a new incarnation: the old one is probably gone

    def _lapse(self, session: Session) -> None:
        books = self._books
        session.life.move(SessionState.EXPIRED, "silence")
        session.since_ms = books.now_ms
        books.forget_waiters(session.incarnation)
        for lease in list(session.leases.values()):
            if lease.life.state is LeaseState.HELD:
                books.revoke(lease, "session_expired")
        session.probed_ms = books.now_ms
        books.out.append(ProbeHolder(session.incarnation))
        self.forget_if_over(session)

    def _remove(self, session: Session, why: str) -> None:
        books = self._books
        session.life.move(SessionState.DEAD, why)
        del books.sessions[session.incarnation]
        for name, known in list(books.by_worker.items()):
            if known is session:
                del books.by_worker[name]
        books.out.append(ForgetHolder(session.incarnation))
