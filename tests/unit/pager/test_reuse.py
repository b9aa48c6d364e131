"""What is learned of how pages are used again, and what follows for their worth."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pagemesh.pager.eviction.reuse import ReuseModel


def test_a_rate_of_use_is_found_again_whether_or_not_waiting_has_ended() -> None:
    model, rng, rate = ReuseModel(1, 1_024), random.Random(1), 1 / 400
    for since in range(0, 20_000, 4):
        model.enter(0, since, 1)
        used_at = since + round(rng.expovariate(rate))
        if used_at < 20_000:
            model.use(0, since, used_at, 1)
    model.refresh(20_000, 1.0)
    for age in (0, 50, 200, 800):
        assert model.worth[0][model.bucket(age)] == pytest.approx(rate, rel=0.25)


def test_what_is_going_to_be_used_soon_is_worth_more_than_its_hazard_now() -> None:
    model = ReuseModel(1, 1_024)
    for since in range(0, 50_000, 10):
        model.enter(0, since, 1)
        model.use(0, since, since + 300, 1)
    model.refresh(50_000, 1.0)
    worth = model.worth[0]
    assert worth[model.bucket(0)] > 0.5 / 300
    assert worth[model.bucket(0)] < worth[model.bucket(200)] < worth[model.bucket(290)]


def test_a_kind_that_was_hardly_seen_is_judged_like_the_others() -> None:
    model = ReuseModel(2, 1_024)
    for since in range(0, 40_000, 10):
        model.enter(0, since, 1)
        model.use(0, since, since + 100, 1)
    model.enter(1, 39_000, 1)
    model.lose(1, 39_000, 39_500, 1)
    model.refresh(40_000, 1.0)
    assert model.worth[1][0] == pytest.approx(model.worth[0][0], rel=0.2)


def test_ages_are_told_apart_in_half_octaves_without_gaps() -> None:
    model = ReuseModel(1, 256)
    buckets = [model.bucket(age) for age in range(5_000)]
    assert buckets[:9] == [0, 1, 2, 3, 4, 4, 5, 5, 6]
    assert all(later - earlier in (0, 1) for earlier, later in pairwise(buckets))
