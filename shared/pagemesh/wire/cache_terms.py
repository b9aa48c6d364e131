"""Which tenant a sequence is charged to, within which quotas, and how long its cache is kept."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pagemesh.wire.messages import Count, Value

CACHE_TTL_S_MAX = 30 * 86_400


class CacheTerms(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set by the gateway, and passed on by every hop.

    The pages that a tenant's sequences use at once are limited to ``pool_share`` of the pool or
    to ``pages_max``, whichever is smaller; the pages that each host's disk keeps for the tenant,
    to ``disk_share`` of the disk's room or to ``disk_pages_max``. 0 means no limit."""

    tenant: Annotated[str, Meta(max_length=64)] = ""
    """A label, not a secret."""
    pool_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    pages_max: Count = 0
    ttl_s: Annotated[int, Meta(ge=0, le=CACHE_TTL_S_MAX)] = 0
    """Time to live in seconds after the last use; 0: as long as there is room."""

    disk_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    disk_pages_max: Count = 0

    @property
    def has_quota(self) -> bool:
        """Whether the tenant's pages in use at once are limited."""
        return self.pool_share > 0.0 or self.pages_max > 0

    def quota_pages(self, total_pages: int) -> int:
        """Pages of a pool of ``total_pages`` that the tenant may use at once: all of them
        without a limit, at least one with any limit."""
        return _quota(total_pages, self.pool_share, self.pages_max)

    @property
    def has_disk_quota(self) -> bool:
        """Whether the tenant's pages on disk are limited."""
        return self.disk_share > 0.0 or self.disk_pages_max > 0

    def disk_quota_pages(self, total_pages: int) -> int:
        """Like ``quota_pages``, for a disk with room for ``total_pages``."""
        return _quota(total_pages, self.disk_share, self.disk_pages_max)


def _quota(total_pages: int, share: float, pages_max: int) -> int:
    quota = total_pages
    if share:
        quota = int(total_pages * share)
    if pages_max:
        quota = min(quota, pages_max)
    return max(quota, 1)


NO_TERMS = CacheTerms()
