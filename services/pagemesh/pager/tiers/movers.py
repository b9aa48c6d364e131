"""Which workers to ask to move pages of a device, after one has failed to.

What failed a moment ago usually fails again, and each failure has a cost: pages that are held for
nothing, and slots on disk that are given up for pages that never come.
"""

from __future__ import annotations

from pagemesh.pager.books import Books
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.tiers.load import PAGER


class Movers:
    """For pages in the pool file, only loads at which the disk is slow matter here."""

    def __init__(self, limits: PagerLimits) -> None:
        self._rest_ms, self._slow_ms = limits.mover_rest_ms, limits.mover_slow_ms
        self._rests_until_ms: dict[int, int] = {}
        """By incarnation: until when a worker that failed to fill pages is not asked."""
        self._none_until_ms = 0
        """Until when nobody is asked to copy pages out, since nobody did."""

    def failed_in(self, incarnation: int, now_ms: int) -> None:
        """The worker failed to fill pages."""
        resting = self._rests_until_ms.items()
        self._rests_until_ms = {one: until for one, until in resting if until > now_ms}
        self._rests_until_ms[incarnation] = now_ms + self._rest_ms

    def failed_out(self, now_ms: int) -> None:
        """No worker copied pages out."""
        self._none_until_ms = now_ms + self._rest_ms

    def try_again(self) -> None:
        """Ask for pages to be copied out again, since it matters now."""
        self._none_until_ms = 0

    def can_fill(self, incarnation: int, books: Books) -> bool:
        """Whether the worker is worth asking to fill pages."""
        if self._rests_until_ms.get(incarnation, 0) > books.now_ms:
            return False
        fillers = (incarnation, PAGER)  # in any one pool, all loads are the pager's or none is
        its = (load for load in books.loads.values() if load.incarnation in fillers)
        return all(books.now_ms - load.begun_ms <= self._slow_ms for load in its)

    def can_copy(self, now_ms: int) -> bool:
        """Whether anybody is worth asking to copy pages out."""
        return self._none_until_ms <= now_ms
