"""Recently ended leases, so that a repeated release gets the same answer as the first."""

from __future__ import annotations

import numpy as np


class EndedLeases:
    """The last ``count_max`` ended leases, 16 bytes each. Every request adds one, but only a
    repeated release looks one up, so they lie in a ring buffer that is searched linearly."""

    __slots__ = ("_holder_at", "_holders", "_lease_at", "_leases", "_next")

    def __init__(self, count_max: int) -> None:
        # Zero is no lease. Zeros take no memory until they are written to, and memoryviews are
        # faster for single items.
        self._leases = np.zeros(count_max, np.uint64)
        self._holders = np.zeros(count_max, np.uint64)
        self._lease_at, self._holder_at = self._leases.data, self._holders.data
        self._next = 0

    def add(self, lease: int, incarnation: int) -> None:
        """``lease`` ended; ``incarnation`` was the last to hold it."""
        at = self._next
        self._lease_at[at] = lease
        self._holder_at[at] = incarnation
        self._next = (at + 1) % len(self._lease_at)

    def was_held_by(self, lease: int, incarnation: int) -> bool:
        """Whether ``lease`` ended recently and ``incarnation`` was the last to hold it."""
        held = (self._leases == lease) & (self._holders == incarnation)
        return lease > 0 and bool(held.any())
