"""The limits of a tenant: pages, requests at once, and how long its pages stay cached. Pure.

``PAGEMESH_TENANT_LIMITS`` separates tenants by commas and a tenant's limits by spaces; ``*`` is
everybody who is not named:

    alice:pages=25% cache_ttl_s=600, *:pages=40% requests=32
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pagemesh.wire.cache_terms import CACHE_TTL_S_MAX, CacheTerms
from pagemesh.wire.errors import ConfigError

EVERYBODY_ELSE = "*"
TENANTS_MAX = 1_024
TENANT_CHARACTERS_MAX = 64
_NUMBER_MAX = 0xFFFF_FFFF
_DIGITS_MAX = 10


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """0 is no limit. ``cache_ttl_s``: the longest time to live that a request's pages may have."""

    pool_share: float = 0.0
    pages_max: int = 0
    disk_share: float = 0.0
    disk_pages_max: int = 0
    requests_max: int = 0
    cache_ttl_s: int = 0

    def terms(self, tenant: str, wanted_ttl_s: int) -> CacheTerms:
        """The terms that the pager gets with a request of ``tenant``, which wants its pages to live
        for ``wanted_ttl_s`` seconds after their last use (0: for good)."""
        wished = [ttl_s for ttl_s in (wanted_ttl_s, self.cache_ttl_s) if ttl_s]
        return CacheTerms(
            tenant=tenant,
            pool_share=self.pool_share,
            pages_max=self.pages_max,
            disk_share=self.disk_share,
            disk_pages_max=self.disk_pages_max,
            ttl_s=min(wished, default=0),
        )

    def quota_tokens(self, pool_pages: int, page_size: int) -> int:
        """Token slots of the pages that the tenant may use at once."""
        return self.terms("", 0).quota_pages(pool_pages) * page_size


NO_LIMITS = TenantLimits()


def parse_limits(text: str) -> Mapping[str, TenantLimits]:
    """Limits by tenant. Raises ``ConfigError`` that says which part is wrong."""
    found: dict[str, TenantLimits] = {}
    for part in text.split(",") if text.strip() else []:
        tenant, colon, rest = part.strip().partition(":")
        if not colon or not tenant or len(tenant) > TENANT_CHARACTERS_MAX:
            raise _wrong(part, "write tenant:limit=value, for example alice:pages=25%")
        if tenant in found:
            raise _wrong(part, f"{tenant} is listed twice")
        limits = NO_LIMITS
        for wish in rest.split():
            limits = _with(limits, wish)
        found[tenant] = limits
    if len(found) > TENANTS_MAX:
        raise ConfigError(f"PAGEMESH_TENANT_LIMITS lists more than {TENANTS_MAX} tenants")
    return found


def _with(limits: TenantLimits, wish: str) -> TenantLimits:
    name, _, value = wish.partition("=")
    if name in ("pages", "disk_pages") and value.endswith("%"):
        try:
            share = float(value[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0.0 < share <= 1.0:
            what = "pool" if name == "pages" else "disk"
            raise _wrong(wish, f"a share of the {what} must be above 0% and at most 100%")
        if name == "pages":
            return replace(limits, pool_share=share)
        return replace(limits, disk_share=share)
    is_number = value.isascii() and value.isdigit() and len(value) <= _DIGITS_MAX
    number = int(value) if is_number else 0
    if not 0 < number <= _NUMBER_MAX:
        raise _wrong(
            wish, "a limit must be a whole number above 0 or, for pages, a share such as 25%"
        )
    match name:
        case "pages":
            return replace(limits, pages_max=number)
        case "disk_pages":
            return replace(limits, disk_pages_max=number)
        case "requests":
            return replace(limits, requests_max=number)
        case "cache_ttl_s" if number <= CACHE_TTL_S_MAX:
            return replace(limits, cache_ttl_s=number)
        case "cache_ttl_s":
            raise _wrong(wish, f"cache_ttl_s must be at most {CACHE_TTL_S_MAX}")
        case _:
            raise _wrong(wish, "no such limit; use pages, disk_pages, requests or cache_ttl_s")


def _wrong(part: str, what: str) -> ConfigError:
    return ConfigError(f"PAGEMESH_TENANT_LIMITS: {part.strip()[:80]!r}: {what}")
