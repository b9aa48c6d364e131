"""What the listing of the edges that are worth the most adds up."""

from __future__ import annotations

from tests.unit.pager.rig import Rig, Worker
from tests.unit.pager.steps import cache

from pagemesh.wire.cache_messages import AskCacheTop, CacheTop


def test_who_uses_an_edge_counts_for_all_that_are_above_it(rig: Rig, worker: Worker) -> None:
    longer = [*range(8), 9, 9, 9, 9]
    cache(worker, 1, range(8))
    cache(worker, 2, longer)
    for number in (3, 4):
        cache(worker, number, [*longer, 0])
    answer = rig.ask(AskCacheTop(limit=9))
    assert isinstance(answer, CacheTop)
    assert [(line.pages, line.uses) for line in answer.lines] == [(2, 3), (1, 2)]


def test_what_was_used_of_an_edge_that_has_left_counts_for_the_one_above_it(
    rig: Rig, worker: Worker
) -> None:
    longer = [*range(8), 9, 9, 9, 9]
    cache(worker, 1, range(8))
    cache(worker, 2, longer)
    for number in (3, 4):
        cache(worker, number, [*longer, 0])
    worker.granted(9, range(100, 156))  # one page more than are free
    answer = rig.ask(AskCacheTop(limit=9))
    assert isinstance(answer, CacheTop)
    assert [(line.pages, line.uses) for line in answer.lines] == [(2, 3)]
