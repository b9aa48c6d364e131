"""In whose name a sequence takes pages, and how long what it caches is kept."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pagemesh.wire.messages import Count, Value

CACHE_TTL_S_MAX = 30 * 86_400


class CacheTerms(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set by the gateway, and passed on by every hop.

    The pages that a tenant's sequences use at once are limited by the smaller of ``pool_share``
    of the pool and ``pages_max``; 0 is no limit."""

    tenant: Annotated[str, Meta(max_length=64)] = ""
    """A label, not a secret."""
    pool_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    pages_max: Count = 0
    ttl_s: Annotated[int, Meta(ge=0, le=CACHE_TTL_S_MAX)] = 0
    """Seconds after the last use; 0: for as long as there is room."""

    @property
    def has_quota(self) -> bool:
        """Whether the pages that the tenant uses at once are limited."""
        return self.pool_share > 0.0 or self.pages_max > 0

    def quota_pages(self, total_pages: int) -> int:
        """Pages of a pool of ``total_pages`` that the tenant may use at once: all of them
        without a limit, at least one with any."""
        quota = total_pages
        if self.pool_share:
            quota = int(total_pages * self.pool_share)
        if self.pages_max:
            quota = min(quota, self.pages_max)
        return max(quota, 1)


NO_TERMS = CacheTerms()
