"""How sides that are compared take turns."""

from __future__ import annotations

from itertools import chain, pairwise

from ops.bench.bench_pager_turns import turn_order


def test_everybody_is_first_as_often_as_the_others_and_nobody_goes_twice_in_a_row() -> None:
    rounds = [turn_order(["before", "after", "lru"], number) for number in range(6)]
    assert [names[0] for names in rounds] == ["before", "after", "lru"] * 2
    assert all(one != other for one, other in pairwise(chain.from_iterable(rounds)))
