"""The tree that a new pager life finds in page headers."""

from __future__ import annotations

from tests.unit.pager.rig import ROOT, Rig, Worker, table_of
from tests.unit.pager.steps import OTHER, cache

from pagemesh.pager.events import PagesStored
from pagemesh.wire.tokens import pack


def test_answers_that_grew_side_by_side_are_one_edge_each_again(rig: Rig, worker: Worker) -> None:
    one, two = worker.granted(1, range(4), 32), worker.granted(2, range(100, 104), 32)
    for count in range(4, 33, 4):
        worker.committed(one, range(count))
        worker.committed(two, range(100, 100 + count))
    rig.restart()
    [tree] = rig.core.books.forest.trees.values()
    assert sorted(len(node.pages) for node in tree.root.below()) == [8, 8]
    late = Worker(rig, "late", 2)
    assert late.granted(3, [*range(100, 132), 0]).cached_tokens == 32


def test_what_was_committed_first_is_evicted_first_after_a_restart(
    rig: Rig, worker: Worker
) -> None:
    for number in (3, 1, 2):
        tokens = range(100 * number, 100 * number + 20)
        worker.release(worker.granted(number, tokens), tokens)
    rig.restart()
    late = Worker(rig, "late", 2)
    late.release(late.granted(9, range(900, 904), 24))
    cached = []
    for number in (1, 2, 3):
        lease = late.granted(number, range(100 * number, 100 * number + 21))
        cached.append(lease.cached_tokens)
        late.release(lease)
    assert cached == [20, 20, 0]


def test_what_is_found_is_announced_with_its_place(rig: Rig, worker: Worker) -> None:
    worker.release(worker.granted(1, range(8)), range(8))
    fork = [*range(4), *range(90, 94)]
    worker.release(worker.granted(2, fork), fork)
    rig.restart()
    first, *then = [c for c in rig.commands if isinstance(c, PagesStored)]
    assert list(first.after) == [] and first.tokens == pack(range(4))
    assert [list(one.after) for one in then] == [list(first.pages)] * 2
    assert {one.tokens for one in then} == {pack(range(4, 8)), pack(range(90, 94))}


def test_headers_whose_parents_go_round_in_a_ring_are_not_believed(
    rig: Rig, worker: Worker
) -> None:
    first, then = worker.granted(1, range(4)), worker.granted(2, range(100, 104))
    worker.release(first, range(4))
    worker.release(then, range(100, 104))
    pages = [*table_of(first), *table_of(then)]
    rig.headers.parents[pages] = rig.headers.identities[pages[::-1]]
    rig.restart()
    assert rig.core.report().free_pages == 16


def test_a_header_that_names_its_own_page_as_the_one_before_it_is_not_believed(
    rig: Rig, worker: Worker
) -> None:
    first, then = worker.granted(1, range(4)), worker.granted(2, range(100, 104))
    worker.release(first, range(4))
    worker.release(then, range(100, 104))
    [page] = table_of(then)
    rig.headers.parents[page] = rig.headers.identities[page]
    rig.restart()
    assert rig.core.report().idle_pages == 1
    late = Worker(rig, "late", 2)
    assert late.granted(3, [*range(4), *range(100, 104), 0]).cached_tokens == 4


def test_a_page_that_goes_on_where_a_page_of_another_root_ends_is_not_believed(
    rig: Rig, worker: Worker
) -> None:
    """It would be read with weights, or by a tenant, that it was not computed for."""
    cache(worker, 1, range(8))
    cache(worker, 2, range(100, 104), root=OTHER)
    second = table_of(worker.granted(3, range(9)))[1]
    rig.headers.roots[second] = rig.core.books.forest.trees[OTHER].index
    rig.cached.discard(second)
    rig.restart()
    assert rig.core.report().idle_pages == 2
    late = Worker(rig, "late", 2)
    assert late.granted(4, range(9), root=ROOT).cached_tokens == 4
    assert late.granted(5, range(9), root=OTHER).cached_tokens == 0


def test_what_others_go_on_from_is_evicted_after_all_of_them_after_a_restart(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(8))
    cache(worker, 2, range(100, 108))
    for number in (3, 4):
        cache(worker, number, [*range(8), *4 * [number]])
    rig.restart()
    late = Worker(rig, "late", 5)
    late.release(late.granted(6, range(900, 956)), cache=False)  # it leaves two pages
    assert late.granted(7, [*range(8), 0]).cached_tokens == 8
