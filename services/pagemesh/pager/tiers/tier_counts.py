"""What the disk tier counts: what became of pages, and why pages are no longer on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagemesh.pager.tree.leaving import Why


@dataclass(slots=True)
class TierCounts:
    """What happened so far, in pages."""

    stored: int = 0
    loaded: int = 0
    from_memory: int = 0
    """Those of the loaded pages that were in memory as well."""
    corrupt: int = 0
    after_corrupt: int = 0
    """Dropped because a page before them was damaged."""
    cut_off: int = 0
    """Dropped because a page before them was not stored, or turned out to be another."""
    evicted: int = 0
    over_quota: int = 0
    """Evicted because their own tenant had used up its quota."""
    expired: int = 0
    invalidated: int = 0
    not_stored: int = 0
    """Left the pool while the buffer was full, every slot was busy, or no worker copied them."""
    declined: int = 0
    """Were on disk, but were computed because that was faster."""

    def left(self, why: Why, count: int) -> None:
        """``count`` pages are dropped from disk too, since pages left the pool for ``why``."""
        if why is Why.EXPIRED:
            self.expired += count
        elif why is Why.INVALIDATED:
            self.invalidated += count


REASONS: Mapping[str, str] = {
    "cut_off": "cut_off",
    "evicted": Why.EVICTED.value,
    "over_quota": Why.QUOTA.value,
    "expired": Why.EXPIRED.value,
    "invalidated": Why.INVALIDATED.value,
    "corrupt": "corrupt",
    "after_corrupt": "corrupt",
}
"""By count of pages that are no longer on disk: the reason, under the pool's name for it."""
