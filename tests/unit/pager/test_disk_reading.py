"""Who has pages read from disk, and what follows for others and for what is read next."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.pager.disk_rig import PROMPT, DiskRig, flood, pushed, put_on_disk
from tests.unit.pager.rig import LIMITS, Worker, is_queued
from tests.unit.pager.steps import cache

from pagemesh.pager.tiers.disk_tier import DiskTier

SECOND, THIRD = range(50, 67), range(100, 117)
"""Four full pages each, as ``PROMPT``."""


def disk_of(rig: DiskRig) -> DiskTier:
    disk = rig.core.books.disk
    assert disk is not None
    return disk


def test_nothing_is_read_for_whom_there_is_no_place_to_wait_for_it() -> None:
    rig = DiskRig(16, limits=replace(LIMITS, waiter_count_max=1))
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, PROMPT)
    worker.granted(2, SECOND)
    assert is_queued(worker.admit(3, SECOND)), "until that is computed"
    assert worker.granted(4, PROMPT).cached_tokens == 0
    assert not rig.loads


def test_what_is_read_is_used_so_that_others_make_room_on_disk() -> None:
    rig = DiskRig(16, slot_count=8)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, PROMPT)
    put_on_disk(rig, worker, SECOND)
    cache(worker, 3, THIRD)
    assert is_queued(worker.admit(4, PROMPT))
    rig.load()
    [read] = pushed(rig)
    worker.release(read, PROMPT)
    flood(worker)
    assert sum(len(store.slots) for store in rig.stores) == 4, "nothing of it is written again"
    assert disk_of(rig).counts.evicted == 4


def test_what_was_found_cached_took_no_time_to_compute() -> None:
    """Computing would seem quicker than it is, and too little be read."""
    rig = DiskRig(16)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, range(32))
    disk = disk_of(rig)
    disk.cost.prefill_tokens_per_ms = 0.0
    lease = worker.granted(2, range(41))
    assert lease.cached_tokens == 32
    rig.now_ms += 100
    worker.committed(lease, range(41))
    assert disk.cost.prefill_tokens_per_ms == pytest.approx(8 / 100)


def test_what_was_read_from_disk_is_not_counted_as_computed_by_others() -> None:
    rig = DiskRig(16)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, PROMPT)
    assert is_queued(worker.admit(2, PROMPT))
    rig.load()
    [read] = pushed(rig)
    assert (read.waterfall.fetched_tokens, read.waterfall.awaited_tokens) == (16, 0)
    assert rig.core.books.in_flight.saved_tokens == 0
