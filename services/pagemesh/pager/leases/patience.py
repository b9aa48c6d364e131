"""How long a pager that receives no request can do without a ``Tick``. Pure."""

from __future__ import annotations

from pagemesh.pager.books import Books
from pagemesh.pager.leases.states import SessionState

_OPEN = SessionState.OPEN
TICK_MS = 50
"""While something depends on time, or there is work that ticks do in parts."""
CALM_TICK_MS = 100
"""While subscribers have yet to be told of pages that were stored or dropped."""
IDLE_TICK_MS = 500
_LATE_MS_MAX = 1_000


class Absence:
    """Works out from a pager's ticks for how long it could hear nobody: its process or machine was
    suspended, or the bus was unreachable, which it notices after at most ``unnoticed_ms``."""

    def __init__(self, *, unnoticed_ms: int) -> None:
        self._unnoticed_ms = unnoticed_ms
        self._ticked_ms: int | None = None
        self._on_bus = True

    def at_tick(self, now_ms: int, *, on_bus: bool) -> int:
        """Milliseconds before this tick in which nobody could be heard, so that they count as
        nobody's silence; 0 when nothing is unusual."""
        before_ms, self._ticked_ms = self._ticked_ms, now_ms
        was_on_bus, self._on_bus = self._on_bus, on_bus
        if before_ms is None:
            return 0
        since_ms = now_ms - before_ms
        if not on_bus:
            return since_ms + (self._unnoticed_ms if was_on_bus else 0)
        late_ms = since_ms - IDLE_TICK_MS
        return late_ms if late_ms > _LATE_MS_MAX else 0


def patience_ms(books: Books) -> int:
    """How long until the next tick: ``TICK_MS`` while something is pending, else until a session
    may expire, and at most ``IDLE_TICK_MS``."""
    if (
        books.waiting.count
        or books.in_flight.wait_count
        or books.revoked
        or books.tickets
        or books.unsettled
        or books.forest.lifetimes.is_due_by(books.now_ms + IDLE_TICK_MS)
    ):
        return TICK_MS
    ends_ms = books.now_ms + IDLE_TICK_MS
    for one in books.sessions.values():
        if one.life.state is not _OPEN or one.letting_go:
            return TICK_MS
        if one.expires_ms < ends_ms:
            ends_ms = one.expires_ms
    return max(ends_ms - books.now_ms, TICK_MS)
