"""What operators read of the answers about a cache."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pagemesh.cli.caching.cache_tables import (
    invalidated_text,
    lines_text,
    pinned_text,
    shown_age,
    stats_text,
    unpinned_text,
)
from pagemesh.wire.cache_messages import (
    CacheInvalidated,
    CacheLine,
    CacheStats,
    CacheTop,
    CacheTree,
    DiskLine,
    DiskTenantLine,
    InvalidateCache,
    PinLine,
    PrefixPinned,
    PrefixUnpinned,
)

ROOT, PIN = "ab" * 32, "1" * 16
STATS = CacheStats(
    host="h", epoch=1, page_size=16, page_bytes=1 << 20, total_pages=64, free_pages=30,
    held_pages=4, pinned_pages=10, idle_pages=20, draining_pages=0, root_count=2,
    retired_root_count=0, lease_count=3, left_pages={"evicted": 5, "expired": 0, "quota": 2},
    prompt_tokens=400, cached_tokens=100, pins=[], pin_pages_max=16, pins_given_way=0,
    disk=DiskLine(state="off", why_off="PAGEMESH_DISK_DIR names no folder"),
)  # fmt: skip
PINNED = PrefixPinned(host="h", pin=PIN, pages=2, tokens=32, asked_tokens=32, expires_in_s=None)
RETIRED = CacheInvalidated(
    host="h",
    root_count=600,
    roots=[ROOT],
    unknown_root_count=0,
    freed_pages=7,
    used_pages=0,
    pins=[],
)


IDLE = InvalidateCache(what="idle")


def edge(level: int = 0, **how: Any) -> CacheLine:
    known: dict[str, Any] = {
        "root": ROOT, "level": level, "depth_pages": 3, "pages": 3, "tokens": 48, "pins": 1,
        "uses": 12, "age_s": 60,
    }  # fmt: skip
    return CacheLine(**(known | how))


def tree(*lines: CacheLine, first: int = 0, more: bool = False) -> str:
    return lines_text(CacheTree(host="h", first=first, lines=list(lines), more=more))


def test_stats_say_where_pages_are_what_was_hit_and_what_left() -> None:
    assert stats_text(STATS).splitlines() == [
        "h: 64 pages of 16 tokens (64 MiB)",
        "  pages    30 free, 4 held, 10 pinned, 20 idle, 0 draining",
        "  prompts  400 tokens admitted, 100 of them cached (25.0%)",
        "  disk     off: PAGEMESH_DISK_DIR names no folder",
        "  left     5 evicted, 2 quota",
        "  roots    2; 3 leases",
        "  pins     0 with 0 pages, at most 16",
    ]


def test_stats_list_pins_and_what_is_not_as_it_should_stay() -> None:
    pin = PinLine(pin=PIN, root=ROOT, pages=4, tokens=64, expires_in_s=7_200)
    busy = msgspec.structs.replace(
        STATS, pins=[pin], pins_given_way=1, retired_root_count=1, left_pages={}, prompt_tokens=0
    )
    *_, left, roots, pins, last = stats_text(busy).splitlines()
    assert left == "  left     nothing" and roots == "  roots    2, 1 retired; 3 leases"
    assert pins == "  pins     1 with 4 pages, at most 16; 1 gave way"
    assert last == f"    {PIN}  root abababababab  4 pages for 2 h"


def test_stats_say_what_is_on_disk_and_what_became_of_it() -> None:
    disk = DiskLine(
        state="on", total_pages=4_096, used_pages=512, root_count=3, stored=600, loaded=40,
        not_stored=7, over_quota=2,
        tenants=[DiskTenantLine(tenant="alice", pages=90, quota_pages=100)],
    )  # fmt: skip
    lines = stats_text(msgspec.structs.replace(STATS, disk=disk, is_sweeping=True, swept_pages=9))
    assert lines.splitlines()[3:6] == [
        "  disk     512 of 4096 pages (512 MiB of 4 GiB) of 3 roots",
        "           600 pages written, 40 read back, 2 over a tenant's quota, 7 not stored",
        "    alice  90 pages, at most 100",
    ]
    assert lines.splitlines()[-1] == "  freeing  9 invalidated pages so far, and it goes on"
    opening = msgspec.structs.replace(STATS, disk=DiskLine(state="opening"))
    assert stats_text(opening).splitlines()[3] == "  disk     opening"


def test_stats_say_what_is_in_the_hosts_memory_and_came_from_there() -> None:
    disk = DiskLine(
        state="on", medium="memory", total_pages=4, used_pages=2, root_count=1, stored=5, loaded=4,
        from_memory=3,
    )  # fmt: skip
    lines = stats_text(msgspec.structs.replace(STATS, disk=disk))
    assert lines.splitlines()[3:5] == [
        "  memory   2 of 4 pages (2 MiB of 4 MiB) of 1 root",
        "           5 pages written, 4 read back, 3 read from memory",
    ]


def test_an_invalidation_that_lasts_says_so() -> None:
    lasting = msgspec.structs.replace(RETIRED, goes_on=True)
    *_, last = invalidated_text(lasting, IDLE).splitlines()
    assert last == "  it goes on: `pagemesh cache stats` says when it is done"


@pytest.mark.parametrize(
    ("known", "told"),
    [
        (["alice", "bob"], "of these something is: alice, bob"),
        ([], "nor of another tenant by name"),
    ],
)
def test_a_name_that_nothing_is_cached_under_is_said_to_be_one(known: list[str], told: str) -> None:
    asked = InvalidateCache(what="tenant", name="alcie")
    nothing = msgspec.structs.replace(RETIRED, root_count=2, unknown_root_count=2, known=known)
    _, line = invalidated_text(nothing, asked).splitlines()
    assert line == f"  nothing is cached here of a tenant 'alcie'; {told}"
    assert len(invalidated_text(RETIRED, asked).splitlines()) == 1
    assert len(invalidated_text(nothing, IDLE).splitlines()) == 1


def test_edges_stand_in_columns_each_below_the_one_above_it() -> None:
    heads, first, second = tree(edge(), edge(1, uses=1_234, age_s=None)).splitlines()[1:]
    assert heads.split() == [
        "root", "model", "tenant", "prefix", "ends", "pages", "tokens", "pins", "uses", "age",
    ]  # fmt: skip
    assert first.split() == [
        "abababababab", "?", "?", "page", "3", "3", "48", "1", "12", "1", "min",
    ]  # fmt: skip
    assert second.split()[-2:] == ["1234", "?"]
    assert second.index("page 3") == first.index("page 3") + 2
    assert len({len(line) for line in (heads, first, second)}) == 1
    assert ROOT not in tree(edge())


def test_edges_say_whose_their_root_is_as_far_as_somebody_said() -> None:
    """For whoever is to name it to `invalidate`."""
    rows = tree(edge(model="llama", tenant="alice"), edge(model="llama"), edge()).splitlines()[2:]
    assert [row.split()[1:3] for row in rows] == [["llama", "alice"], ["llama", "-"], ["?", "?"]]


def test_a_listing_says_how_it_goes_on_or_that_there_is_nothing() -> None:
    assert tree() == "h: nothing"
    assert tree(edge(), edge(), first=100, more=True).endswith("\n  more: --first 102")
    assert "more" not in tree(edge())
    part, whole = (
        lines_text(CacheTop(host="h", lines=[edge(5)], complete=complete))
        for complete in (False, True)
    )
    assert part == whole + "\n  (there are more edges than were looked at: name a root with --root)"
    assert "  ?       page 3  " in whole, "what is worth the most has no level"


def test_a_pin_says_what_it_keeps_and_for_how_long() -> None:
    assert pinned_text(PINNED) == f"h: {PIN} keeps 2 pages, 32 tokens"
    part = msgspec.structs.replace(PINNED, asked_tokens=40, expires_in_s=90)
    assert pinned_text(part) == f"h: {PIN} keeps 2 pages, 32 of 40 tokens for 1 min"
    assert unpinned_text(PrefixUnpinned(host="h", pins=[PIN, PIN])) == f"h: unpinned {PIN}, {PIN}"
    assert unpinned_text(PrefixUnpinned(host="h", pins=[])) == "h: unpinned nothing"


def test_a_pin_says_what_it_replaces_so_that_nobodys_is_shortened_unseen() -> None:
    was = PinLine(pin=PIN, root=ROOT, pages=1, tokens=16, expires_in_s=7_200)
    again = msgspec.structs.replace(PINNED, expires_in_s=10, before=was)
    kept = f"h: {PIN} keeps 2 pages, 32 tokens for 10 s"
    assert pinned_text(again) == f"{kept} (before: 1 page for 2 h)"
    endless = msgspec.structs.replace(was, pages=2, expires_in_s=None)
    again = msgspec.structs.replace(again, before=endless)
    assert pinned_text(again) == f"{kept} (before: 2 pages until it is unpinned)"


def test_one_is_one_page_and_not_1_pages() -> None:
    one = msgspec.structs.replace(PINNED, pages=1, tokens=1, asked_tokens=1)
    assert pinned_text(one) == f"h: {PIN} keeps 1 page, 1 token"
    freed = msgspec.structs.replace(RETIRED, root_count=1, freed_pages=1, used_pages=1)
    assert invalidated_text(freed, IDLE).splitlines() == [
        "h: 1 root retired, 1 page freed",
        "  in use until their sequences end: 1 page",
    ]
    assert "; 1 lease\n" in stats_text(msgspec.structs.replace(STATS, lease_count=1))


def test_an_invalidation_says_what_is_free_now_later_and_unpinned() -> None:
    assert invalidated_text(RETIRED, IDLE) == "h: 600 roots retired, 7 pages freed"
    more = msgspec.structs.replace(RETIRED, unknown_root_count=1, used_pages=3, pins=[PIN])
    assert invalidated_text(more, IDLE).splitlines() == [
        "h: 600 roots retired (1 of them of nobody known), 7 pages freed",
        "  in use until their sequences end: 3 pages",
        f"  unpinned {PIN}",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3_599, "59 min"), (86_399, "23 h"),
     (400_000, "4 d")],
)  # fmt: skip
def test_an_age_has_one_unit(seconds: int, shown: str) -> None:
    assert shown_age(seconds) == shown
