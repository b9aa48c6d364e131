"""Reading what is stored against computing it, by what both took lately."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pagemesh.pager.tiers.fetch_cost import FIXED_MS, Bandwidth, FetchCost
from pagemesh.pager.tiers.recent_slots import RecentSlots
from pagemesh.pager.tiers.tier_events import PagesLoaded

PAGE_BYTES, PAGE_SIZE = 1_000_000, 16
MEMORY_SLOTS = range(100, 200)


def load(
    cost: FetchCost,
    slots: Sequence[int],
    took_us: int,
    *,
    memory_count: int = 0,
    memory_us: int = 0,
    now_ms: int = 0,
) -> None:
    """All of ``slots`` were read."""
    cost.begun(1, slots)
    event = PagesLoaded(1, len(slots), took_us, None, memory_count, memory_us)
    cost.loaded(event, slots, now_ms)


def slow(cost: FetchCost, page_ms: int, now_ms: int) -> None:
    """The disk takes ``page_ms`` a page from now on."""
    for _ in range(50):
        load(cost, [1], 1_000 * page_ms, now_ms=now_ms)


@pytest.fixture
def cost() -> FetchCost:
    """A page takes 1 ms from disk, 0.1 ms from memory, and 8 ms to compute."""
    cost = FetchCost(PAGE_BYTES, PAGE_SIZE, memory_pages=len(MEMORY_SLOTS))
    load(cost, range(20), 11_000, memory_count=10, memory_us=1_000)
    cost.recent.used(MEMORY_SLOTS)
    cost.computed(1_000, 500)
    return cost


def test_memory_and_disk_have_a_bandwidth_each(cost: FetchCost) -> None:
    assert cost.disk.believed(1) == PAGE_BYTES
    assert cost.memory.believed(1) == 10 * PAGE_BYTES


def test_a_bandwidth_is_believed_for_a_minute() -> None:
    one = Bandwidth()
    one.measured(1_000, 1_000, 0)
    assert (one.believed(59_999), one.believed(60_000)) == (1_000, 0.0)


def test_the_quicker_way_is_taken(cost: FetchCost) -> None:
    assert FIXED_MS == 1.0
    assert cost.pages_worth(range(7), 1) == 7
    cost.begun(2, range(5))
    assert cost.pages_worth([7], 1) == 1
    cost.begun(3, [5])
    assert cost.pages_worth([7], 1) == 0, "8 ms to compute, 8 to fetch after six others"
    assert cost.pages_worth([7, 8], 1) == 2
    cost.begun(4, MEMORY_SLOTS)
    assert cost.pages_worth([7, 8], 1) == 0, "and after what comes from memory"
    assert cost.pages_worth([7, 8, 9], 1) == 3


def test_what_is_over_is_not_waited_for(cost: FetchCost) -> None:
    cost.begun(2, range(100))
    assert cost.pages_worth([101], 1) == 0
    cost.loaded(PagesLoaded(2, 0, 1), [], 1)
    assert cost.pages_worth([101], 1) == 1


def test_of_a_run_as_much_is_fetched_as_saves_most(cost: FetchCost) -> None:
    slow(cost, 100, 2)
    assert cost.pages_worth([*range(110, 113), 20, 21], 3) == 3
    assert cost.pages_worth([20, 21, *range(110, 113)], 3) == 0
    assert cost.pages_worth([110, 20], 3) == 1
    assert cost.pages_worth([20, *range(110, 121)], 3) == 0
    assert cost.pages_worth([20, *range(110, 125)], 3) == 16, "those that follow make up for it"


def test_reading_is_tried_while_anything_is_unknown_or_long_ago(cost: FetchCost) -> None:
    slow(cost, 100, 10)
    assert cost.pages_worth([20], now_ms=10) == 0
    assert cost.pages_worth([20], now_ms=60_011) == 1
    fresh = FetchCost(PAGE_BYTES, PAGE_SIZE, memory_pages=1)
    load(fresh, [1], 10_000_000)
    assert fresh.pages_worth([2], now_ms=1) == 1, "what computing takes is not known"
    fresh.computed(1_000, 1)
    assert fresh.pages_worth([2], now_ms=1) == 0
    assert fresh.pages_worth([2, 1], now_ms=1) == 2, "what memory takes is not known"


def test_newer_measurements_count_more(cost: FetchCost) -> None:
    for _ in range(30):
        load(cost, [1], 10_000, now_ms=2)
        cost.computed(1_000, 1_000)
    assert cost.disk.believed(2) == pytest.approx(100_000, rel=0.01)
    assert cost.memory.believed(2) == 10 * PAGE_BYTES
    assert cost.prefill_tokens_per_ms == pytest.approx(1.0, rel=0.01)


def test_what_took_no_time_that_can_be_measured_is_no_division_by_nothing(
    cost: FetchCost,
) -> None:
    load(cost, [1, 2], 0, memory_count=1, now_ms=3)
    assert cost.pages_worth([1, 20], 3) == 2
    for _ in range(30):
        cost.computed(16, 0)
    assert cost.pages_worth([20], 3) == 0, "they take a millisecond, as far as can be told"


def test_what_was_used_last_should_be_in_memory() -> None:
    recent = RecentSlots(2)
    recent.used([1, 2, 3])
    assert [slot in recent for slot in (1, 2, 3)] == [False, True, True]
    recent.used([2, 4])
    assert [slot in recent for slot in (2, 3, 4)] == [True, False, True]
    recent.forget(4)
    recent.forget(4)
    recent.used([5])
    assert [slot in recent for slot in (2, 4, 5)] == [True, False, True]


def test_without_memory_nothing_should_be_there() -> None:
    recent = RecentSlots(0)
    recent.used([1])
    assert 1 not in recent
