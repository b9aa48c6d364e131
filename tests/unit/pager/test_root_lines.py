"""Lines of the root table, while workers have not declared what an earlier pager granted them."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.pager.rig import ROOT, Rig, Worker, table_of
from tests.unit.pager.steps import OTHER, cache, invalidated
from tests.unit.pager.test_recovery import declare, line

from pagemesh.pager.retention.roots import has_root_place, tree_of
from pagemesh.wire.cache_terms import NO_TERMS
from pagemesh.wire.pager_messages import Granted
from pagemesh.wire.pool_format import HeaderState

NEW, EMPTY_TREE = bytes(31) + b"3", bytes(31) + b"4"


class TestPlantedAnew:
    """A lease that is not declared in the life of the pager in which its root is invalidated, in
    which another lease of the tree ends, and in which the root is planted anew."""

    @pytest.fixture
    def lease(self, rig: Rig, worker: Worker) -> Granted:
        lease, other = worker.granted(1, range(8)), Worker(rig, "other", 2)
        rig.restart([worker.holder, other.holder])
        other.open()
        last = other.granted(2, range(100, 108))
        invalidated(rig, "root", ROOT.hex())
        other.release(last)
        assert not rig.core.books.forest.retired, "its tree is gone"
        assert other.granted(3, range(8)).cached_tokens == 0
        return lease

    def test_is_lost_though_the_next_pager_knows_no_invalidation(
        self, rig: Rig, worker: Worker, lease: Granted
    ) -> None:
        """What it computed would be read by others if it were taken up."""
        rig.restart([worker.holder])
        assert declare(rig, worker, line(lease, 1, list(range(8)))) == [lease.lease]

    def test_leaves_its_line_to_others_once_its_worker_has_let_go(
        self, rig: Rig, worker: Worker, lease: Granted
    ) -> None:
        lines = rig.core.books.root_lines
        assert len(lines.kept) == 1
        assert declare(rig, worker, line(lease, 1, list(range(8)))) == [lease.lease]
        assert len(lines.kept) == 1, "another has not declared"
        rig.die(2)
        assert len(lines.kept) == 1, "a running step may write to its pages, which name it"
        worker.ack(lease)
        assert not lines.kept

    def test_is_lost_when_no_header_tells_what_it_is_of(
        self, rig: Rig, worker: Worker, lease: Granted
    ) -> None:
        """A pager died while it wrote the headers of all its pages."""
        rig.headers.states[table_of(lease)] = HeaderState.INVALID
        rig.restart([worker.holder])
        assert declare(rig, worker, line(lease, 1, list(range(8)))) == [lease.lease]


def test_the_line_of_a_root_that_is_invalidated_before_any_pager_heard_of_its_leases_is_kept(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, range(8))
    rig.restart([worker.holder])
    invalidated(rig, "root", ROOT.hex())
    rig.restart([worker.holder])
    late = Worker(rig, "late", 2)
    late.granted(2, range(8))
    rig.restart([worker.holder, late.holder])
    assert declare(rig, worker, line(lease, 1, list(range(8)))) == [lease.lease]


def test_an_empty_tree_makes_way_for_a_root_while_workers_have_not_declared(
    rig: Rig, worker: Worker
) -> None:
    """Nothing is evicted for it."""
    worker.release(worker.granted(1, range(8)), cache=False)
    rig.restart([worker.holder])
    books, lines = rig.core.books, rig.core.books.root_lines
    lines.free, free = [], lines.free
    assert has_root_place(books, OTHER)
    assert tree_of(books, OTHER, NO_TERMS).digest == OTHER and ROOT not in books.forest.trees
    lines.free += free


@pytest.mark.parametrize(
    ("edge_counts", "left"), [((200, 2, 1), 1), ((2, 1, 200), 0), ((200, 150, 180), 1)]
)
def test_a_tree_that_is_freed_quickly_makes_way_before_a_large_one_that_is_unused_for_longer(
    edge_counts: tuple[int, ...], left: int
) -> None:
    rig = Rig(1_000)
    worker, roots = Worker(rig, "w", 1), [ROOT, OTHER, EMPTY_TREE]
    for root, count in zip(roots, edge_counts, strict=True):
        for number in range(count):
            cache(worker, number, [number, 1, 2, 3], root=root)
    books, lines = rig.core.books, rig.core.books.root_lines
    lines.free, free = [], lines.free
    assert has_root_place(books, NEW)
    assert tree_of(books, NEW, NO_TERMS)
    assert books.forest.trees.keys() == {*roots, NEW} - {roots[left]}
    lines.free += free


def test_a_tree_of_which_a_lease_may_be_declared_makes_way_for_none(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, range(8))
    rig.restart([worker.holder])
    lines = rig.core.books.root_lines
    lines.free, free = [], lines.free
    assert not has_root_place(rig.core.books, OTHER)
    lines.free = free
    assert declare(rig, worker, line(lease, 1, list(range(8)))) == []


def test_a_cached_page_that_drains_for_a_lost_lease_is_not_of_the_root_that_is_planted_anew(
    rig: Rig, worker: Worker
) -> None:
    """Its header names the line that its root had, as long as it is not free."""
    cached, slow = worker.granted(1, range(9)), Worker(rig, "slow", 2)
    worker.committed(cached, range(9))
    lost = slow.granted(2, range(8), root=OTHER)
    invalidated(rig, "root", ROOT.hex())
    invalidated(rig, "root", OTHER.hex())
    rig.restart([worker.holder, slow.holder])
    assert declare(rig, worker, line(cached, 1, list(range(9)))) == [cached.lease]
    assert declare(rig, slow, line(lost, 2, [])) == [lost.lease]
    worker.ack(cached)
    assert worker.granted(3, range(9)).cached_tokens == 0
    rig.restart([worker.holder, slow.holder])
    worker.open()
    assert worker.granted(4, range(9)).cached_tokens == 0


def test_no_tree_makes_way_whose_line_would_be_kept(rig: Rig, worker: Worker) -> None:
    """Though all have declared: a page that names it is a lost lease's, or drains for one."""
    kept, slow = worker.granted(1, range(9)), Worker(rig, "slow", 2)
    worker.committed(kept, range(9))
    worker.release(kept, range(9))
    lost = slow.granted(2, range(8), root=OTHER)
    worker.release(worker.granted(3, range(4), root=EMPTY_TREE), cache=False)
    rig.headers.states[table_of(kept)[0]] = HeaderState.INVALID  # and what is below it is limbo
    rig.words[lost.lease_slot] = 0
    rig.restart([worker.holder, slow.holder])
    declare(rig, worker)
    assert declare(rig, slow, line(lost, 2, [])) == [lost.lease]
    assert len(rig.core.books.limbo) == 2
    books, lines = rig.core.books, rig.core.books.root_lines
    lines.free, free = [], lines.free
    assert has_root_place(books, NEW)
    assert tree_of(books, NEW, NO_TERMS)
    assert books.forest.trees.keys() == {ROOT, OTHER, NEW}
    lines.free += free


def test_a_line_stays_its_roots_while_a_lost_lease_of_it_is_not_let_go_of(
    rig: Rig, worker: Worker
) -> None:
    """Though no page drains for it but its own."""
    lost = worker.granted(1, range(8))
    (index,) = rig.roots
    invalidated(rig, "root", ROOT.hex())
    rig.restart([worker.holder])
    assert declare(rig, worker, line(lost, 1, [])) == [lost.lease]
    assert not len(rig.core.books.limbo)
    late = Worker(rig, "late", 2)
    late.granted(2, range(8))
    assert rig.core.books.forest.trees[ROOT].index != index
    worker.ack(lost)
    late.granted(3, range(8), root=OTHER)
    assert rig.core.books.forest.trees[OTHER].index == index, "nothing names it any more"


def test_a_lease_for_which_pages_of_another_root_were_evicted_is_taken_up(
    rig: Rig, worker: Worker
) -> None:
    """Their headers name the root that they are held for."""
    cache(worker, 1, range(64))
    lease = worker.granted(2, range(200, 210), root=OTHER)
    assert rig.core.books.pool.evicted == 3
    rig.restart([worker.holder])
    held = msgspec.structs.replace(line(lease, 2, []), root=OTHER)
    assert declare(rig, worker, held) == []
