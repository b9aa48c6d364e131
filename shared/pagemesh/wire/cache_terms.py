"""In whose name a sequence takes pages, and how long what it caches is kept."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pagemesh.wire.messages import Count, Value

CACHE_TTL_S_MAX = 30 * 86_400


class CacheTerms(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set by the gateway, and passed on by every hop.

    The pages that a tenant's sequences use at once are limited by the smaller of ``pool_share``
    of the pool and ``pages_max``; those that are kept for it on each host's disk by the smaller of
    ``disk_share`` of the room there and ``disk_pages_max``. 0 is no limit."""

    tenant: Annotated[str, Meta(max_length=64)] = ""
    """A label, not a secret."""
    pool_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    pages_max: Count = 0
    ttl_s: Annotated[int, Meta(ge=0, le=CACHE_TTL_S_MAX)] = 0
    """Seconds after the last use; 0: for as long as there is room."""

    disk_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    disk_pages_max: Count = 0

    @property
    def has_quota(self) -> bool:
        """Whether the pages that the tenant uses at once are limited."""
        return self.pool_share > 0.0 or self.pages_max > 0

    def quota_pages(self, total_pages: int) -> int:
        """Pages of a pool of ``total_pages`` that the tenant may use at once: all of them
        without a limit, at least one with any."""
        return _quota(total_pages, self.pool_share, self.pages_max)

    @property
    def has_disk_quota(self) -> bool:
        """Whether the pages that are kept for the tenant on disk are limited."""
        return self.disk_share > 0.0 or self.disk_pages_max > 0

    def disk_quota_pages(self, total_pages: int) -> int:
        """Pages of a disk with room for ``total_pages`` that may be the tenant's, as
        ``quota_pages``."""
        return _quota(total_pages, self.disk_share, self.disk_pages_max)


def _quota(total_pages: int, share: float, pages_max: int) -> int:
    quota = total_pages
    if share:
        quota = int(total_pages * share)
    if pages_max:
        quota = min(quota, pages_max)
    return max(quota, 1)


NO_TERMS = CacheTerms()
