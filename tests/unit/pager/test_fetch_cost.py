"""Reading from disk against computing, by what both took lately."""

from __future__ import annotations

import pytest

from pagemesh.pager.fetch_cost import FIXED_MS, FetchCost

PAGE_BYTES, PAGE_SIZE = 1_000_000, 16


@pytest.fixture
def cost() -> FetchCost:
    """A gigabyte a second, and 2,000 tokens a second."""
    cost = FetchCost(PAGE_BYTES, PAGE_SIZE)
    cost.read(10, 10_000, now_ms=0)
    cost.computed(1_000, 500)
    return cost


def test_what_both_would_take_follows_from_what_was_measured(cost: FetchCost) -> None:
    assert cost.fetch_ms(20, 0, now_ms=1) == FIXED_MS + 20.0
    assert cost.fetch_ms(20, 5, now_ms=1) == FIXED_MS + 25.0, "after what was asked for before"
    assert cost.compute_ms(20) == 160.0


def test_the_quicker_way_is_taken(cost: FetchCost) -> None:
    assert cost.is_fetch_quicker(20, 0, now_ms=1)
    assert cost.is_fetch_quicker(1, 5, now_ms=1)
    assert not cost.is_fetch_quicker(1, 6, now_ms=1), "8 ms to compute, 8 to fetch"


def test_reading_is_tried_while_anything_is_unknown_or_long_ago(cost: FetchCost) -> None:
    cost.read(1, 10_000_000, now_ms=10)
    assert not cost.is_fetch_quicker(1, 10, now_ms=10)
    assert cost.is_fetch_quicker(1, 10, now_ms=60_011)
    assert FetchCost(PAGE_BYTES, PAGE_SIZE).is_fetch_quicker(1, 1_000, now_ms=0)


def test_newer_measurements_count_more(cost: FetchCost) -> None:
    for _ in range(30):
        cost.read(1, 10_000, now_ms=2)
        cost.computed(1_000, 1_000)
    assert cost.disk_bytes_per_ms == pytest.approx(100_000, rel=0.01)
    assert cost.prefill_tokens_per_ms == pytest.approx(1.0, rel=0.01)


def test_what_took_no_time_that_can_be_measured_is_no_division_by_nothing(
    cost: FetchCost,
) -> None:
    cost.read(1, 0, now_ms=3)
    cost.computed(16, 0)
    assert cost.is_fetch_quicker(1, 0, now_ms=3)
