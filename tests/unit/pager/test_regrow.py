"""The tree that a new pager life finds in page headers."""

from __future__ import annotations

from tests.unit.pager.rig import Rig, Worker, table_of


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
