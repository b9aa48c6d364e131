"""What a pager does not believe after a restart, be it declared or in the pool; and what of it is
given back at the end when it was true."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.pager.rig import ROOT, Rig, Worker, fill_of, table_of
from tests.unit.pager.steps import OTHER, cache, invalidated
from tests.unit.pager.test_recovery import declare, line

from pagemesh.pager.events import RootEntry
from pagemesh.wire.pager_messages import HeldLease
from pagemesh.wire.tokens import pack_extents


@pytest.fixture
def held(rig: Rig, worker: Worker) -> HeldLease:
    """A lease of three pages that nobody else has, after a restart."""
    lease = worker.granted(1, range(12))
    rig.restart([worker.holder])
    return line(lease, 1, [])


def test_what_holds_a_page_twice_is_lost(rig: Rig, worker: Worker, held: HeldLease) -> None:
    wrong = msgspec.structs.replace(held, extents=pack_extents([0, 1, 1]))
    assert declare(rig, worker, wrong) == [held.lease]
    assert rig.core.report().held_pages == 0


def test_what_was_granted_in_a_time_to_come_is_lost(
    rig: Rig, worker: Worker, held: HeldLease
) -> None:
    """No page that is given out anew could be told from those that it means."""
    latest = rig.core.books.pool.last_sequence
    wrong = msgspec.structs.replace(held, granted_at=latest + 1)
    assert declare(rig, worker, wrong) == [held.lease]


def test_an_offered_lease_that_is_lost_has_no_writer_to_wait_for(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(12))
    offered = worker.offered(lease, fill_of(range(10)))
    rig.restart([worker.holder])
    wrong = line(lease, 1, list(range(10)), ticket=offered.ticket, granted_at=1)
    assert declare(rig, worker, wrong) == [lease.lease]
    assert rig.core.report().draining_pages == 0


def test_private_copies_of_what_is_cached_are_given_back_after_a_restart(
    rig: Rig, worker: Worker
) -> None:
    """Two computed the same: one's pages are cached, the other's are its own."""
    one = worker.granted(1, range(9), read_cache=False)
    two = worker.granted(2, range(9), read_cache=False)
    worker.committed(one, range(9))
    worker.committed(two, range(9))
    rig.restart([worker.holder])
    lines = [line(lease, number, list(range(9))) for number, lease in ((1, one), (2, two))]
    assert declare(rig, worker, *lines) == []
    assert (rig.core.report().pinned_pages, rig.core.report().held_pages) == (2, 4)
    assert len(set(table_of(one) + table_of(two))) == 6
    for lease in (one, two):
        worker.release(lease, range(9))
    assert (rig.core.report().idle_pages, rig.core.report().free_pages) == (2, 14)


# What the pool may not say


def test_a_page_whose_parent_is_of_another_root_is_not_believed_though_that_is_there(
    rig: Rig, worker: Worker
) -> None:
    lease = cache(worker, 1, range(16))
    cache(worker, 2, range(100, 108), root=OTHER)
    other = int(rig.headers.roots[rig.headers.tokens[:, 0] == 100][0])
    rig.headers.roots[table_of(lease)[2]] = other
    rig.restart()
    assert rig.core.report().idle_pages == 4, "two of each"


def test_a_root_that_has_two_lines_has_one_tree(rig: Rig, worker: Worker) -> None:
    """As a root table that was damaged may say."""
    cache(worker, 1, range(8))
    rig.roots[9] = RootEntry(9, ROOT, True)
    rig.restart()
    assert Worker(rig, "late", 2).granted(2, range(9)).cached_tokens == 8
    rig.roots.pop(9)


def test_the_line_of_a_root_of_which_nothing_is_left_is_free_after_a_restart(
    rig: Rig, worker: Worker
) -> None:
    """Though headers of free pages name it."""
    cache(worker, 1, range(8))
    invalidated(rig, "root", ROOT.hex())
    rig.tick()
    assert rig.core.report().free_pages == 16
    rig.restart([worker.holder])
    assert not rig.core.books.root_lines.kept
