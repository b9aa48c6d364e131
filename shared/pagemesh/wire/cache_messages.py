"""Messages between operators and a pager: inspect, pin and invalidate what is cached.

    operator -> pager      reply
    AskCacheStats          CacheStats
    AskCacheTree           CacheTree
    AskCacheTop            CacheTop
    PinPrefix              PrefixPinned
    UnpinPrefix            PrefixUnpinned
    InvalidateCache        CacheInvalidated

They travel as JSON on ``subjects.cache_door``, so their field names are a public interface. Any
request may be answered with an error (``code`` and ``message``). No answer contains token ids.
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
"""Where pages that leave the pool are kept."""
PIN_TTL_S_MAX = 365 * 86_400
RootName = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
RootStart = Annotated[str, Meta(pattern=r"^[0-9a-f]{0,64}\Z")]
"""The first digits of a root's name; empty: any root."""
PinName = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Limit = Annotated[int, Meta(ge=1, le=LINES_MAX)]


@registered("cache.ask_stats")
class AskCacheStats(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ask for the ledger, what left the cache and why, and what is pinned."""


class PinLine(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pin: PinName
    root: RootName
    pages: Count
    tokens: Count
    expires_in_s: Count | None
    """None: the pin lasts until it is unpinned."""


class DiskTenantLine(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant with a quota on disk."""

    tenant: ShortText
    pages: Count
    quota_pages: Count


class DiskLine(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The disk tier, in pages. Counters start with this life of the pager."""

    state: Literal["on", "opening", "off"]
    why_off: str = ""
    medium: Medium = "disk"
    total_pages: Count = 0
    used_pages: Count = 0
    staged_pages: Count = 0
    """Of the used pages, those still waiting to be written."""
    root_count: Count = 0
    stored: U64 = 0
    loaded: U64 = 0
    """Read back into the pool, so that prompts did not have to compute them."""
    from_memory: U64 = 0
    """Of the loaded pages, those that were also in host memory."""
    declined: U64 = 0
    """On disk, but computed because that was faster."""
    evicted: U64 = 0
    over_quota: U64 = 0
    """Evicted because their own tenant had used up its quota; not counted in ``evicted``."""
    expired: U64 = 0
    invalidated: U64 = 0
    not_stored: U64 = 0
    """Left the pool while too much was waiting to be written, or every slot was in use."""
    corrupt: U64 = 0
    """Failed verification, and were computed instead."""
    after_corrupt: U64 = 0
    """Dropped because a page before them in the prefix was damaged."""
    cut_off: U64 = 0
    """Dropped because a page before them in the prefix left the pool and was not stored."""
    tenants: list[DiskTenantLine] = []
    """At most 500, the tenant that uses the largest share of its quota first."""


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
    """Roots that no new sequence can match, but that running sequences still use."""
    lease_count: Count
    left_pages: dict[ShortText, U64]
    """Pages that left the cache in this life of the pager, by reason."""
    prompt_tokens: U64
    """Prompt tokens admitted in this life of the pager."""
    cached_tokens: U64
    """Of these, the tokens that were cached."""
    pins: list[PinLine]
    pin_pages_max: Count
    pins_given_way: Count
    """Pins that were ended because a sequence could not get its pages in any other way."""
    is_sweeping: bool = False
    """Whether invalidated pages are still being freed, or forgotten on disk."""
    swept_pages: Count = 0
    """Pages of the pool freed by the current sweep, or by the last one."""
    disk: DiskLine = DiskLine(state="off")


@registered("cache.ask_tree")
class AskCacheTree(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List the edges of the prefix trees, parents first, from index ``first`` on."""

    root: RootStart = ""
    first: Count = 0
    limit: Limit = 100


class CacheLine(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One edge of a prefix tree."""

    root: RootName
    level: Count
    """Number of edges above it."""
    depth_pages: Count
    """Pages from the root to the end of the edge."""
    pages: Count
    tokens: Count
    pins: Count
    """Reference count: leases, pins and child edges that need this edge."""
    uses: Count
    """Admissions that read this edge."""
    age_s: Count | None
    """Time since its last page was cached; None: an earlier pager cached it."""
    model: ShortText = ""
    """The root's model and tenant, as far as this pager was told; empty: unknown, or no tenant."""
    tenant: ShortText = ""


@registered("cache.tree")
class CacheTree(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``more``: more edges follow."""

    host: Name
    first: Count
    lines: list[CacheLine]
    more: bool


@registered("cache.ask_top")
class AskCacheTop(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """List the edges that saved the most prefill (``reuse``: admissions that read an edge, times
    its tokens), or the ends of the longest prefixes (``size``)."""

    by: Literal["reuse", "size"] = "reuse"
    root: RootStart = ""
    limit: Limit = 20


@registered("cache.top")
class CacheTop(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``complete`` is False when there are more edges than one request examines."""

    host: Name
    lines: list[CacheLine]
    complete: bool


@registered("cache.pin")
class PinPrefix(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Protect what is cached of ``tokens`` (whole pages, from the start) from eviction. Repeating
    it sets the pin's lifetime anew and extends the pin to what was cached since."""

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
    """The pin of the same prefix that this one replaces, however much time it had left."""


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
    """Drop everything cached under a ``root`` (the only one whose digits start with ``name``), of
    the ``model`` or ``tenant`` called ``name``, or everything ``idle``. A root whose model or
    tenant this pager does not know counts as a match for any name."""

    what: Literal["root", "model", "tenant", "idle"]
    name: ShortText = ""


@registered("cache.invalidated")
class CacheInvalidated(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Name
    root_count: Count
    """Roots that were retired."""
    roots: list[RootName]
    """The first 500 of them."""
    unknown_root_count: Count
    """Retired roots whose model or tenant is unknown."""
    freed_pages: Count
    """Pages freed so far."""
    used_pages: Count
    """Pages still in use, which are freed when the sequences that use them end."""
    pins: list[PinName]
    """Pins that were ended."""
    known: list[ShortText] = []
    """If nothing cached belongs to the named model or tenant: up to 20 names that are known."""
    goes_on: bool = False
    """More is freed in later turns of the pager, while ``CacheStats.is_sweeping`` is True."""
