"""Which workers are asked to move pages of a device, now that one has not done so.

What failed a moment ago mostly fails again, and costs others something each time: pages that are
held for nothing, slots of the disk that are given away for what then does not come.
"""

from __future__ import annotations

from pagemesh.pager.books import Books
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.tiers.load import PAGER


class Movers:
    """Of a pool whose pages are in memory only what the disk is slow at is ever said here."""

    def __init__(self, limits: PagerLimits) -> None:
        self._rest_ms, self._slow_ms = limits.mover_rest_ms, limits.mover_slow_ms
        self._rests_until_ms: dict[int, int] = {}
        """By incarnation: of those that did not fill what they were to fill."""
        self._none_until_ms = 0
        """Nobody copied pages out."""

    def failed_in(self, incarnation: int, now_ms: int) -> None:
        """The worker has not filled pages."""
        resting = self._rests_until_ms.items()
        self._rests_until_ms = {one: until for one, until in resting if until > now_ms}
        self._rests_until_ms[incarnation] = now_ms + self._rest_ms

    def failed_out(self, now_ms: int) -> None:
        """Nobody has copied pages out."""
        self._none_until_ms = now_ms + self._rest_ms

    def try_again(self) -> None:
        """It matters now whether anybody copies pages out."""
        self._none_until_ms = 0

    def can_fill(self, incarnation: int, books: Books) -> bool:
        """Whether the worker is worth asking."""
        if self._rests_until_ms.get(incarnation, 0) > books.now_ms:
            return False
        fillers = (incarnation, PAGER)  # who fills pages is either, for all of a pool
        its = (load for load in books.loads.values() if load.incarnation in fillers)
        return all(books.now_ms - load.begun_ms <= self._slow_ms for load in its)

    def can_copy(self, now_ms: int) -> bool:
        """Whether anybody is worth asking to copy pages out."""
        return self._none_until_ms <= now_ms
