"""What was invalidated is freed in parts, and found no more from the first one on."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.pager.disk_rig import PROMPT, DiskRig, flood, put_on_disk
from tests.unit.pager.rig import ROOT, Rig, Worker, fill_of
from tests.unit.pager.steps import OTHER, cache, invalidated, stats
from tests.unit.pager.test_recovery import declare, line

from pagemesh.pager.events import SetStates, Sweep
from pagemesh.pager.leases import filling
from pagemesh.pager.retention import sweeps
from pagemesh.pager.tiers import traffic as tiers

LATER = bytes([7]) * 32


@pytest.fixture(autouse=True)
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "_EDGES_MAX", 4)
    monkeypatch.setattr(tiers, "_SWEPT_PAGES_MAX", 2)


def branches(worker: Worker, count: int, root: bytes = ROOT) -> None:
    """A page that ``count`` prompts share, each with one of its own."""
    for number in range(count):
        ids = [*range(4), *range(100 * number, 100 * number + 4)]
        worker.release(worker.granted(50 + number, ids, root=root), ids)


def sweep(rig: Rig) -> list[int]:
    """Turns until nothing is left to sweep; how many pages each freed."""
    freed: list[int] = []
    for _ in range(50):
        if not rig.core.is_sweeping:
            return freed
        marked = [c for c in rig.handle(Sweep()) if isinstance(c, SetStates)]
        freed.append(sum(len(one.pages) for one in marked))
    raise AssertionError("it never ends")


def test_a_root_is_freed_in_parts_and_found_no_more_at_once(rig: Rig, worker: Worker) -> None:
    branches(worker, 9)
    done = invalidated(rig, "root", ROOT.hex())
    assert done.goes_on and 0 < done.freed_pages < 4
    assert worker.granted(1, range(5)).cached_tokens == 0
    told: Any = stats(rig)
    assert told.is_sweeping and told.swept_pages == done.freed_pages
    freed = sweep(rig)
    assert len(freed) > 2 and max(freed) <= 4
    assert done.freed_pages + sum(freed) == 10 == stats(rig).swept_pages
    assert not rig.cached and not rig.core.books.forest.retired


@pytest.mark.sources
def test_a_release_that_must_not_be_cached_leaves_a_retired_root_to_the_sweep(
    rig: Rig, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[object] = []
    monkeypatch.setattr(filling, "give_up", lambda _, anchor: given_up.append(anchor))
    branches(worker, 2)
    used, other = (worker.granted(number, range(5)) for number in (1, 2))
    worker.release(other, cache=False)
    assert len(given_up) == 1
    invalidated(rig, "root", ROOT.hex())
    worker.release(used, cache=False)
    assert len(given_up) == 1
    sweep(rig)
    assert not rig.cached and not rig.core.books.forest.retired


def test_what_is_cached_after_the_call_or_used_stays(rig: Rig, worker: Worker) -> None:
    branches(worker, 8)
    worker.release(worker.granted(1, range(90, 94), root=OTHER), range(90, 94))
    invalidated(rig, "idle")
    used = worker.granted(2, [*range(4), 0, 1, 2, 3, 9])
    assert used.cached_tokens == 8, "it is there still"
    worker.release(worker.granted(3, range(70, 74)), range(70, 74))
    sweep(rig)
    assert stats(rig).is_sweeping is False
    assert worker.granted(4, range(70, 75)).cached_tokens == 4
    assert worker.granted(5, range(90, 95), root=OTHER).cached_tokens == 0
    worker.release(used)
    assert worker.granted(6, [*range(4), 0, 1, 2, 3, 9]).cached_tokens == 8


def test_what_is_cached_after_the_call_behind_what_is_not_swept_yet_stays_too(
    rig: Rig, worker: Worker
) -> None:
    branches(worker, 8)
    invalidated(rig, "idle")
    longer = [*range(4), 0, 1, 2, 3, 7, 7, 7, 7]
    computed = worker.granted(1, longer)
    assert computed.cached_tokens == 8, "it is there still"
    worker.release(computed, longer)
    sweep(rig)
    assert rig.core.books.pool.idle == 3
    assert worker.granted(2, [*longer, 9]).cached_tokens == 12


def test_what_was_freed_is_counted_anew_when_there_was_nothing_left_to_free(
    rig: Rig, worker: Worker
) -> None:
    for pages in (3, 2):
        cache(worker, pages, range(4 * pages))
        invalidated(rig, "idle")
        sweep(rig)
        assert stats(rig).swept_pages == pages


def test_who_ends_before_the_sweep_comes_leaves_nothing(rig: Rig, worker: Worker) -> None:
    branches(worker, 6)
    running = worker.granted(1, [*range(4), 0, 1, 2, 3, 9])
    offered = worker.offered(running, fill_of([*range(4), 0, 1, 2, 3, 9]))
    done = invalidated(rig, "root", ROOT.hex())
    assert done.used_pages == 2
    held = worker.redeemed(running.key, offered)
    worker.release(held, [*range(4), 0, 1, 2, 3, 9, 9, 9, 9])
    sweep(rig)
    assert rig.core.books.pool.free == 16 and not rig.core.books.forest.retired


def test_nothing_is_freed_while_somebody_unheard_may_read_it(rig: Rig, worker: Worker) -> None:
    branches(worker, 3)
    rig.restart([worker.holder])
    done = invalidated(rig, "root", ROOT.hex())
    assert (done.freed_pages, done.goes_on, rig.core.is_sweeping) == (0, True, False)
    declare(rig, worker)
    rig.tick()
    sweep(rig)
    assert rig.core.books.pool.free == 16


def test_who_ends_leaves_what_of_an_invalidated_root_somebody_unheard_may_read(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, range(8))
    slow = Worker(rig, "slow", 2)
    lease = worker.granted(2, range(9))
    assert slow.granted(3, range(9)).cached_tokens == 8
    rig.restart([worker.holder, slow.holder])
    assert declare(rig, worker, line(lease, 2, list(range(8)))) == []
    invalidated(rig, "root", ROOT.hex())
    worker.release(lease)
    assert rig.core.books.pool.idle == 2
    rig.die(2)
    rig.tick()
    assert rig.core.books.pool.free == 16


def test_a_sequence_that_takes_up_what_is_swept_later_is_not_disturbed(
    rig: Rig, worker: Worker
) -> None:
    """It computes what is there still under the retired root, so that is in use again."""
    branches(worker, 6)
    running = worker.granted(1, [8, 8, 8, 8], 12, read_cache=False)
    invalidated(rig, "root", ROOT.hex())
    worker.committed(running, [8, 8, 8, 8])
    sweep(rig)
    assert rig.core.books.pool.pinned == 1
    worker.release(running, [8, 8, 8, 8])
    rig.tick()
    assert rig.core.books.pool.free == 16


def test_what_is_invalidated_and_in_use_is_not_walked_again_until_something_is_left_of_it(
    rig: Rig, worker: Worker
) -> None:
    """A walk that is longer than a turn would go on for as long as the sequences do."""
    branches(worker, 3)
    running = [
        worker.granted(number, [*range(4), *range(100 * number, 100 * number + 5)])
        for number in range(3)
    ]
    invalidated(rig, "root", ROOT.hex())
    sweep(rig)
    for lease in running:
        rig.tick()
        assert not rig.core._sweeps.is_going_on
        worker.release(lease)
    assert rig.core.books.pool.free == 16 and not rig.core.books.forest.retired


def test_of_an_edge_that_is_cut_after_a_sweep_has_listed_it_what_is_idle_is_freed(
    rig: Rig, worker: Worker
) -> None:
    long, short = [*range(4), *range(90, 98)], [*range(4), *range(90, 94)]
    cache(worker, 1, long)
    branches(worker, 6)
    running = worker.granted(2, short, 12, read_cache=False)
    invalidated(rig, "root", ROOT.hex())
    worker.committed(running, short)
    sweep(rig)
    assert (rig.core.books.pool.idle, rig.core.books.pool.pinned) == (0, 2)
    worker.release(running, short)
    assert rig.core.books.pool.free == 16 and not rig.core.books.forest.retired


def test_what_somebody_leaves_above_what_is_being_swept_is_swept_after_that(
    rig: Rig, worker: Worker
) -> None:
    for number in range(6):
        cache(worker, number, [*range(8), *range(100 * number, 100 * number + 4)])
    running = worker.granted(9, range(4), 12, read_cache=False)
    invalidated(rig, "root", ROOT.hex())
    worker.release(running, range(4))  # that has cut the edge whose children are swept now
    sweep(rig)
    assert rig.core.books.pool.idle == 1
    rig.tick()
    assert rig.core.books.pool.free == 16 and not rig.core.books.forest.retired


def test_a_sweep_takes_no_later_tree_for_its_own_that_has_its_line_of_the_root_table(
    rig: Rig, worker: Worker
) -> None:
    branches(worker, 9, OTHER)
    running = worker.granted(1, range(90, 94))
    invalidated(rig, "idle")  # the other root is swept first, for some turns
    invalidated(rig, "root", ROOT.hex())
    worker.release(running)  # the last of its tree, whose line is free with it
    later = worker.granted(2, range(70, 74), root=LATER)
    invalidated(rig, "root", LATER.hex())
    sweep(rig)
    assert [tree.digest for tree in rig.core.books.forest.retired.values()] == [LATER]
    worker.release(later)
    assert rig.core.books.pool.free == 16 and not rig.core.books.forest.retired


def test_what_was_freed_is_still_told_while_a_sequence_of_the_root_goes_on(
    rig: Rig, worker: Worker
) -> None:
    branches(worker, 6)
    running = worker.granted(1, [*range(4), 0, 1, 2, 3, 9])
    invalidated(rig, "root", ROOT.hex())
    sweep(rig)
    told = stats(rig).swept_pages
    assert told == 5, "all but the two that it reads"
    rig.tick()
    assert stats(rig).swept_pages == told
    worker.release(running)


def test_asking_again_and_again_keeps_nothing_more(rig: Rig, worker: Worker) -> None:
    branches(worker, 3)
    rig.restart([worker.holder])
    for _ in range(3):
        invalidated(rig, "idle")
    assert len(rig.core._sweeps._open) == 1
    declare(rig, worker)
    sweep(rig)
    assert rig.core.books.pool.free == 16


# On disk


def test_the_disk_forgets_in_parts_and_gives_nothing_back_meanwhile() -> None:
    rig = DiskRig(16)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, PROMPT)
    done = invalidated(rig, "root", ROOT.hex())
    assert done.goes_on and len(rig.prefixes()) == 2
    assert rig.kept.roots == {ROOT}, "a pager that dies now would find the others"
    assert worker.granted(2, PROMPT).cached_tokens == 0
    sweep(rig)
    assert not rig.prefixes() and not rig.kept


def test_what_is_retired_on_disk_is_freed_to_its_end_however_little_at_a_time() -> None:
    rig = DiskRig(16)
    put_on_disk(rig, Worker(rig, "w", 1), PROMPT)
    disk = rig.core.books.disk
    assert disk is not None
    disk.retire([ROOT])
    assert len(disk.sweep(3)) == 3 and disk.is_sweeping
    assert len(disk.sweep(3)) == 1 and not disk.is_sweeping
    disk.check()


def test_a_pager_that_dies_before_the_disk_has_forgotten_brings_nothing_back() -> None:
    rig = DiskRig(16)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, PROMPT)
    invalidated(rig, "root", ROOT.hex())
    rig.restart_with_an_empty_pool()
    sweep(rig)
    assert not rig.prefixes() and not rig.kept
    worker = Worker(rig, "w", 2)
    assert worker.granted(2, PROMPT).cached_tokens == 0


def test_what_waits_to_be_written_and_was_invalidated_is_not_reported_as_on_disk() -> None:
    rig = DiskRig(16)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    flood(worker)
    cache(worker, 2, range(50, 55), root=OTHER)
    flood(worker, 901)
    assert invalidated(rig, "root", ROOT.hex()).goes_on, "two of four are to be swept"
    assert rig.core.report().disk_pages == 0
    sweep(rig)
    assert rig.core.report().disk_pages == 0
    rig.write()
    assert rig.core.report().disk_pages == 1, "that of the other root"


def test_what_is_stored_anew_while_the_disk_forgets_is_kept() -> None:
    rig = DiskRig(16)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, PROMPT)
    invalidated(rig, "root", ROOT.hex())
    put_on_disk(rig, worker, PROMPT)
    sweep(rig)
    assert len(rig.prefixes()) == 4
    cache(worker, 7, range(60, 64))
