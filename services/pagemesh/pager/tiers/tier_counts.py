"""What the disk tier counts: what became of pages, and why those that were on disk are not."""

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
    """Of those loaded, pages that were in memory as well."""
    corrupt: int = 0
    after_corrupt: int = 0
    """Dropped with one before them that was damaged."""
    cut_off: int = 0
    """Dropped since one before them left the pool and was not stored."""
    evicted: int = 0
    over_quota: int = 0
    """Evicted since their own tenant had used up its quota."""
    expired: int = 0
    invalidated: int = 0
    not_stored: int = 0
    """Left the pool while the buffer was full, or every slot busy."""
    declined: int = 0
    """Were on disk, and computed since that was quicker."""

    def left(self, why: Why, count: int) -> None:
        """So many are dropped from the disk as well, with those that left the pool."""
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
"""What is counted of pages that are not on disk any more, and why that is: as the pool calls it."""
