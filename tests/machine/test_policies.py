"""What eviction policies note of edges is so, in whatever order they are told."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from tests.machine.policies import EVICTIONS
from tests.unit.pager.test_eviction import Cache, fresh, steps

from pagemesh.pager.eviction import make_policy


def check(cache: Cache) -> None:
    """Also that nothing that is put off is overlooked."""
    cache.policy.check(cache.root.below())
    cache.check()


@settings(max_examples=60)
@given(steps)
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_what_a_policy_notes_is_so_after_each_step(
    eviction: str, steps: list[tuple[int, ...] | int | None]
) -> None:
    cache = Cache(24, EVICTIONS[eviction](24))
    for step in steps:
        cache.take(step)
        check(cache)


def test_what_was_cut_off_before_a_use_does_not_wait_with_what_is_cut_off_after_it() -> None:
    cache = Cache(24, make_policy("learned", 24))
    cache.serve(fresh(1, 6))
    for _ in range(2):
        cache.evict(2)
        check(cache)
        cache.serve(fresh(1, 6)[: cache.holds(fresh(1, 6))])
        check(cache)
    cache.evict(2)
    check(cache)
