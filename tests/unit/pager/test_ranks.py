"""What urgent requests used outlives what others did, under the policy that asks for that."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tests.unit.pager.rig import LAYOUT, ROOT, Rig, Worker

from pagemesh.pager.eviction import make_policy
from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.state import PagerCore
from pagemesh.wire.tokens import pack

URGENT, USUAL, PATIENT = -1, 0, 1


class RankedRig(Rig):
    """Six pages under the policy ``priority``."""

    def _new_core(self) -> PagerCore:
        facts = PoolFacts(
            "host", self.epoch, 77, self.page_count, self.page_size, 1 << 12, LAYOUT, "/pool"
        )
        return PagerCore(self.limits, facts, make_policy("priority", self.page_count))


def serve(worker: Worker, number: int, tokens: Iterable[int], priority: int) -> None:
    ids = list(tokens)
    worker.release(worker.granted(number, ids, priority=priority), ids)


@pytest.fixture
def rig() -> RankedRig:
    return RankedRig(6)


def prompt(number: int, count: int = 8) -> range:
    return range(100 * number, 100 * number + count)


def cached(rig: Rig, tokens: Iterable[int]) -> int:
    """Pages."""
    ids, forest = list(tokens), rig.core.books.forest
    return forest.match(forest.trees[ROOT].root, pack(ids), len(ids) // rig.page_size).pages


def test_what_less_urgent_requests_left_is_evicted_first_though_it_was_used_last(
    rig: RankedRig, worker: Worker
) -> None:
    serve(worker, 1, prompt(1), URGENT)
    serve(worker, 2, prompt(2), USUAL)
    serve(worker, 3, prompt(3), PATIENT)
    for number, pages, left in ((4, 2, [2, 2, 0]), (5, 4, [2, 0, 0])):
        serve(worker, number, prompt(number, 4 * pages), PATIENT)
        assert [cached(rig, prompt(one)) for one in (1, 2, 3)] == left


def test_a_prefix_is_kept_as_the_most_urgent_who_used_it_wants(
    rig: RankedRig, worker: Worker
) -> None:
    serve(worker, 1, prompt(1), PATIENT)
    serve(worker, 2, [*prompt(1), *prompt(2, 4)], URGENT)
    serve(worker, 3, prompt(3), USUAL)
    serve(worker, 4, prompt(4, 16), USUAL)
    assert cached(rig, [*prompt(1), *prompt(2, 4)]) == 2
    serve(worker, 5, prompt(5), PATIENT)
    assert (cached(rig, prompt(1)), cached(rig, prompt(4, 16))) == (2, 2)


def test_both_parts_of_what_is_cut_are_kept_as_it_was(rig: RankedRig, worker: Worker) -> None:
    serve(worker, 1, prompt(1), 2 * URGENT)
    serve(worker, 2, [*prompt(1, 4), *prompt(2, 4)], PATIENT)
    serve(worker, 3, prompt(3, 20), URGENT)
    serve(worker, 4, prompt(4, 4), USUAL)
    assert (cached(rig, prompt(1)), cached(rig, prompt(3, 20))) == (1, 4)


def test_what_an_earlier_pager_cached_counts_as_used_by_usual_requests(
    rig: RankedRig, worker: Worker
) -> None:
    serve(worker, 1, prompt(1), URGENT)
    rig.restart()
    again = Worker(rig, "w", 2)
    serve(again, 2, prompt(2), PATIENT)
    serve(again, 3, prompt(3), USUAL)
    for number, left in ((4, [2, 0, 2]), (5, [0, 0, 2])):
        serve(again, number, prompt(number), USUAL)
        assert [cached(rig, prompt(one)) for one in (1, 2, 3)] == left
