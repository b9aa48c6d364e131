"""Between operators and a pager: what is cached, what is to stay, what is to go.

    operator -> pager      reply
    AskCacheStats          CacheStats
    AskCacheTree           CacheTree
    AskCacheTop            CacheTop
    PinPrefix              PrefixPinned
    UnpinPrefix            PrefixUnpinned
    InvalidateCache        CacheInvalidated

They travel as JSON on ``subjects.cache_door``, so the names of their fields are an interface.
Any of them may be answered by an error (``code`` and ``message``). No answer holds token ids.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pagemesh.wire.messages import (
    REQUEST_TOKENS_MAX,
    U32,
    U64,
    Count,
    Message,
    Name,
    ShortText,
    Value,
    registered,
)

LINES_MAX = 500
Medium = Literal["disk", "memory"]
"""Where pages go that leave the pool."""
PIN_TTL_S_MAX = 365 * 86_400
RootName = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
RootStart = Annotated[str, Meta(pattern=r"^[0-9a-f]{0,64}\Z")]
"""The first digits of one; empty: any."""
PinName = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Limit = Annotated[int, Meta(ge=1, le=LINES_MAX)]


@registered("cache.ask_stats")
class AskCacheStats(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ledger, what left the cache and why, and what is pinned."""


class PinLine(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pin: PinName
    root: RootName
    pages: Count
    tokens: Count
    expires_in_s: Count | None
    """None: it lasts until it is unpinned."""


class DiskTenantLine(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant with a quota on disk."""

    tenant: ShortText
    pages: Count
    quota_pages: Count


class DiskLine(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The disk tier, in pages; what happened, in this life of the pager."""

    state: Literal["on", "opening", "off"]
    why_off: str = ""
    medium: Medium = "disk"
    total_pages: Count = 0
    used_pages: Count = 0
    staged_pages: Count = 0
    """Of the used ones, those that wait to be written."""
    root_count: Count = 0
    stored: U64 = 0
    loaded: U64 = 0
    """Read back into the pool, for prompts that then did not compute them."""
    from_memory: U64 = 0
    """Of those, pages that were in memory as well."""
    declined: U64 = 0
    """Were there, and computed since that was quicker."""
    evicted: U64 = 0
    over_quota: U64 = 0
    """Evicted since their own tenant had used up its quota."""
    expired: U64 = 0
    invalidated: U64 = 0
    not_stored: U64 = 0
    """Left the pool while too much waited to be written, or every slot was in use."""
    corrupt: U64 = 0
    """Were not what they should be, and were computed."""
    after_corrupt: U64 = 0
    """Dropped with one before them that was damaged."""
    cut_off: U64 = 0
    """Dropped since one before them left the pool and was not stored."""
    tenants: list[DiskTenantLine] = []
    """The first 500, the largest share of its quota first."""


@registered("cache.stats")
class CacheStats(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``free + held + pinned + idle + draining = total``, in pages."""

    host: Name
    epoch: U64
    page_size: Count
    page_bytes: U64
    total_pages: Count
    free_pages: Count
    held_pages: Count
    pinned_pages: Count
    idle_pages: Count
    draining_pages: Count
    root_count: Count
    retired_root_count: Count
    """Roots that nothing new matches, whose last sequences are still running."""
    lease_count: Count
    left_pages: dict[ShortText, U64]
    """Pages that left the cache in this life of the pager, by reason."""
    prompt_tokens: U64
    """Admitted in this life, and those of them that were cached."""
    cached_tokens: U64
    pins: list[PinLine]
    pin_pages_max: Count
    pins_given_way: Count
    """Pins that ended because a sequence had no other way to its pages."""
    is_sweeping: bool = False
    """Pages that were invalidated are being freed, or forgotten on disk."""
    swept_pages: Count = 0
    """Of the pool, freed so by what is under way or was last."""
    disk: DiskLine = DiskLine(state="off")


@registered("cache.ask_tree")
class AskCacheTree(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The edges of the prefix trees, each after the one above it, from index ``first`` on."""

    root: RootStart = ""
    first: Count = 0
    limit: Limit = 100


class CacheLine(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One edge of a prefix tree."""

    root: RootName
    level: Count
    """Edges above it."""
    depth_pages: Count
    """Pages from the root to its end."""
    pages: Count
    tokens: Count
    pins: Count
    """Leases, pins and edges below that need it."""
    uses: Count
    """Admissions that read it."""
    age_s: Count | None
    """Since its last page was cached; None: by an earlier pager."""
    model: ShortText = ""
    """Whose the root is, as far as this pager was told; empty: not, or of no tenant."""
    tenant: ShortText = ""


@registered("cache.tree")
class CacheTree(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``more``: the listing goes on."""

    host: Name
    first: Count
    lines: list[CacheLine]
    more: bool


@registered("cache.ask_top")
class AskCacheTop(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The edges that saved the most prefill (``reuse``: admissions that read them, times their
    tokens), or the ends of the longest prefixes (``size``)."""

    by: Literal["reuse", "size"] = "reuse"
    root: RootStart = ""
    limit: Limit = 20


@registered("cache.top")
class CacheTop(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``complete`` is False when there are more edges than one answer looks at."""

    host: Name
    lines: list[CacheLine]
    complete: bool


@registered("cache.pin")
class PinPrefix(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keep what is cached of ``tokens`` (whole pages, from the start) from eviction. Doing so
    again gives the pin its new lifetime, and what was cached since."""

    root: RootName
    tokens: Annotated[list[U32], Meta(min_length=1, max_length=REQUEST_TOKENS_MAX)]
    ttl_s: Annotated[int, Meta(ge=1, le=PIN_TTL_S_MAX)] | None = None


@registered("cache.pinned")
class PrefixPinned(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Name
    pin: PinName
    pages: Count
    tokens: Count
    asked_tokens: Count
    expires_in_s: Count | None
    before: PinLine | None = None
    """The pin of the same prefix that this one replaces, whatever was left of its time."""


@registered("cache.unpin")
class UnpinPrefix(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End a pin; null: all of them."""

    pin: PinName | None


@registered("cache.unpinned")
class PrefixUnpinned(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Name
    pins: list[PinName]


@registered("cache.invalidate")
class InvalidateCache(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``what``: everything under the root whose digits start with ``name`` (it must be the only
    one), of a ``model`` or a ``tenant``, or all that is ``idle``. A root whose model or tenant
    this pager never heard counts as everybody's."""

    what: Literal["root", "model", "tenant", "idle"]
    name: ShortText = ""


@registered("cache.invalidated")
class CacheInvalidated(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Name
    root_count: Count
    """Retired."""
    roots: list[RootName]
    """The first 500 of these."""
    unknown_root_count: Count
    """Retired though nobody knows whose they are."""
    freed_pages: Count
    """So far."""
    used_pages: Count
    """Freed when the sequences that use them end."""
    pins: list[PinName]
    """Ended."""
    known: list[ShortText] = []
    """When nothing is of the model or tenant that was named: of whom something is, the first 20."""
    goes_on: bool = False
    """More is freed in later turns of the pager, until ``CacheStats.is_sweeping`` is over."""
