"""The machines' pager is stopped for a while, or hears nobody: that counts as no worker's
silence."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.machine.mesh import Mesh
from tests.unit.pager.rig import LIMITS

from pagemesh.pager.events import KillHolder, Tick
from pagemesh.pager.leases.lease import Session

STOPPED_MS = (50, 900, LIMITS.session_ttl_ms + 1_000, LIMITS.ticket_ttl_ms_max + 10_000)


class Absences(Mesh):
    """Rules of absences that are no worker's fault."""

    @rule(stopped_ms=st.sampled_from(STOPPED_MS), more_ms=st.sampled_from([0, 0, 0, 2_300, -300]))
    def nobody_is_heard_for_a_while(self, stopped_ms: int, more_ms: int) -> None:
        """Sessions and tickets that had not expired before still have not. The absence may have
        begun earlier than the pager knows (``more_ms`` above 0), or its last part may have been a
        worker's silence after all (below 0)."""
        rig, books, before_ms = self.rig, self.rig.core.books, self.rig.now_ms
        heard = {
            one.incarnation
            for one in books.sessions.values()
            if one.is_open and one.expires_ms > before_ms
        }
        tickets = {name for name, one in books.tickets.items() if one.expires_ms > before_ms}
        owing_ms = {one.incarnation: self.owing_since_ms(one) for one in books.sessions.values()}
        rig.now_ms += stopped_ms
        commands = rig.handle(Tick(away_ms=max(0, stopped_ms + more_ms)))
        self.pass_on()
        if more_ms < 0:
            return
        assert all(books.sessions[incarnation].is_open for incarnation in heard), "it was silent"
        assert tickets <= books.tickets.keys(), "nobody could redeem it"
        for command in commands:
            if isinstance(command, KillHolder):
                owed_ms = before_ms - owing_ms[command.incarnation]
                is_open = books.sessions[command.incarnation].is_open
                least_ms = LIMITS.busy_drain_ms_max if is_open else LIMITS.drain_ms_max
                assert owed_ms >= least_ms, "it had no time to let go"

    def owing_since_ms(self, session: Session) -> int:
        """Since when it has owed the pager an acknowledgement or a declaration."""
        books = self.rig.core.books
        revoked = [one for one in books.revoked.values() if one.incarnation == session.incarnation]
        owing_ms = [one.revoked_ms for one in revoked]
        is_unheard = not session.is_open or session.incarnation in books.unsettled
        if is_unheard or session.letting_go:
            owing_ms.append(session.since_ms)
        return min(owing_ms, default=books.now_ms)
