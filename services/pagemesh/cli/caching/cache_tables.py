"""Pagers' answers about their caches as text for people. Pure."""

from __future__ import annotations

from pagemesh.cli.words import counted
from pagemesh.runtime.sizes import shown_binary
from pagemesh.wire.cache_messages import (
    CacheInvalidated,
    CacheLine,
    CacheStats,
    CacheTop,
    CacheTree,
    DiskLine,
    InvalidateCache,
    PinLine,
    PrefixPinned,
    PrefixUnpinned,
)

_ROOT_SHOWN = 12
_HEADS = ("root", "model", "tenant", "prefix ends", "pages", "tokens", "pins", "uses", "age")
_NAME_COUNT = 4
"""The first columns hold names, which are aligned to the left."""


def stats_text(stats: CacheStats) -> str:
    """A block for one host."""
    states = ("free", "held", "pinned", "idle", "draining")
    pages = ", ".join(f"{getattr(stats, state + '_pages')} {state}" for state in states)
    total_bytes = stats.total_pages * stats.page_bytes
    left = ", ".join(f"{count} {why}" for why, count in stats.left_pages.items() if count)
    share = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    retired = f", {stats.retired_root_count} retired" if stats.retired_root_count else ""
    kept = sum(line.pages for line in stats.pins)
    out = [
        f"{stats.host}: {counted(stats.total_pages, 'page')} of "
        f"{counted(stats.page_size, 'token')} "
        f"({shown_binary(total_bytes)})",
        f"  pages    {pages}",
        f"  prompts  {counted(stats.prompt_tokens, 'token')} admitted, {stats.cached_tokens} of "
        f"them cached ({share:.1%})",
        *_disk(stats.disk, stats.page_bytes),
        f"  left     {left or 'nothing'}",
        f"  roots    {stats.root_count}{retired}; {counted(stats.lease_count, 'lease')}",
        f"  pins     {len(stats.pins)} with {counted(kept, 'page')}, at most {stats.pin_pages_max}"
        + (f"; {stats.pins_given_way} gave way" if stats.pins_given_way else ""),
    ]
    out += [f"    {_pin(line)}" for line in stats.pins]
    if stats.is_sweeping:
        out.append(
            f"  freeing  {counted(stats.swept_pages, 'invalidated page')} so far, and it goes on"
        )
    return "\n".join(out)


def lines_text(listing: CacheTree | CacheTop) -> str:
    """A table for one host."""
    rows = [_HEADS, *(_row(line, indent=isinstance(listing, CacheTree)) for line in listing.lines)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_HEADS))]
    out = [f"{listing.host}:"]
    for row in rows:
        cells = [
            cell.ljust(width) if at < _NAME_COUNT else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        out.append("  " + "  ".join(cells).rstrip())
    if not listing.lines:
        out = [f"{listing.host}: nothing"]
    elif isinstance(listing, CacheTree) and listing.more:
        out.append(f"  more: --first {listing.first + len(listing.lines)}")
    elif isinstance(listing, CacheTop) and not listing.complete:
        out.append("  (there are more edges than were looked at: name a root with --root)")
    return "\n".join(out)


def pinned_text(pinned: PrefixPinned) -> str:
    """One line."""
    part = "" if pinned.tokens == pinned.asked_tokens else f"{pinned.tokens} of "
    tokens = part + counted(pinned.asked_tokens, "token")
    was = pinned.before
    before = "" if was is None else f" (before: {_kept(was, for_ever=' until it is unpinned')})"
    return (
        f"{pinned.host}: {pinned.pin} keeps {counted(pinned.pages, 'page')}, {tokens}"
        f"{_for(pinned.expires_in_s)}{before}"
    )


def unpinned_text(unpinned: PrefixUnpinned) -> str:
    """One line."""
    return f"{unpinned.host}: unpinned {', '.join(unpinned.pins) or 'nothing'}"


def invalidated_text(done: CacheInvalidated, asked: InvalidateCache) -> str:
    """One line, or a few."""
    unknown = (
        f" ({done.unknown_root_count} of them of nobody known)" if done.unknown_root_count else ""
    )
    out = [
        f"{done.host}: {counted(done.root_count, 'root')} retired{unknown}, "
        f"{counted(done.freed_pages, 'page')} freed"
    ]
    named = done.root_count - done.unknown_root_count
    if asked.what in ("model", "tenant") and not named:
        others = f"of these something is: {', '.join(done.known)}"
        out.append(
            f"  nothing is cached here of a {asked.what} {asked.name!r}; "
            + (others if done.known else f"nor of another {asked.what} by name")
        )
    if done.used_pages:
        used = counted(done.used_pages, "page")
        out.append(f"  in use until their sequences end: {used}")
    if done.pins:
        out.append(f"  unpinned {', '.join(done.pins)}")
    if done.goes_on:
        out.append("  it goes on: `pagemesh cache stats` says when it is done")
    return "\n".join(out)


def _disk(disk: DiskLine, page_bytes: int) -> list[str]:
    if disk.state != "on":
        return [f"  {disk.medium:<8} {disk.state}{': ' if disk.why_off else ''}{disk.why_off}"]
    used, total = (shown_binary(n * page_bytes) for n in (disk.used_pages, disk.total_pages))
    beside = {
        "read from memory": disk.from_memory, "wait to be written": disk.staged_pages,
        "computed, being quicker": disk.declined,
        "evicted": disk.evicted, "over a tenant's quota": disk.over_quota,
        "expired": disk.expired, "invalidated": disk.invalidated,
        "not stored": disk.not_stored, "damaged": disk.corrupt,
        "behind damaged ones": disk.after_corrupt, "behind some not stored": disk.cut_off,
    }  # fmt: skip
    said = "".join(f", {count} {what}" for what, count in beside.items() if count)
    out = [
        f"  {disk.medium:<8} {disk.used_pages} of {counted(disk.total_pages, 'page')} "
        f"({used} of {total}) of {counted(disk.root_count, 'root')}",
        f"           {counted(disk.stored, 'page')} written, {disk.loaded} read back{said}",
    ]
    return out + [
        f"    {one.tenant}  {counted(one.pages, 'page')}, at most {one.quota_pages}"
        for one in disk.tenants
    ]


def _row(line: CacheLine, *, indent: bool) -> tuple[str, ...]:
    space = "  " * min(line.level, 20) if indent else ""
    return (
        line.root[:_ROOT_SHOWN],
        line.model or "?",  # unknown until a sequence is admitted there
        line.tenant or ("-" if line.model else "?"),
        f"{space}page {line.depth_pages}",
        str(line.pages),
        str(line.tokens),
        str(line.pins),
        str(line.uses),
        "?" if line.age_s is None else shown_age(line.age_s),
    )


def shown_age(seconds: int) -> str:
    """``59 s``, ``12 min``, ``3 h``, ``4 d``."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _pin(line: PinLine) -> str:
    root = line.root[:_ROOT_SHOWN]
    return f"{line.pin}  root {root}  {_kept(line)}"


def _kept(line: PinLine, *, for_ever: str = "") -> str:
    return counted(line.pages, "page") + (_for(line.expires_in_s) or for_ever)


def _for(expires_in_s: int | None) -> str:
    return "" if expires_in_s is None else f" for {shown_age(expires_in_s)}"
