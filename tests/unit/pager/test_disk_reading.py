"""Who has pages read from disk, and what follows for others and for what is read next."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.pager.disk_rig import PROMPT, DiskRig, flood, pushed, put_on_disk
from tests.unit.pager.rig import LIMITS, Worker, code_of, is_queued
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


def test_a_prompt_that_is_longer_than_half_of_the_pool_is_read_in_parts() -> None:
    rig = DiskRig(32)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, range(121))
    disk_of(rig).cost.prefill_tokens_per_ms = 0.0  # of what is not known all is read
    assert is_queued(worker.admit(2, range(121)))
    assert [len(load.slots) for load in rig.loads] == [16]
    rig.load()
    assert [len(load.slots) for load in rig.loads] == [14] and not pushed(rig)
    rig.load()
    [read] = pushed(rig)
    assert (read.cached_tokens, read.waterfall.fetched_tokens) == (120, 120)


def test_a_disk_that_never_answers_holds_up_only_who_needs_what_it_keeps() -> None:
    rig = DiskRig(32)
    worker, other = Worker(rig, "w", 1), Worker(rig, "v", 2)
    put_on_disk(rig, worker, range(121))
    assert is_queued(worker.admit(2, range(121)))
    other.granted(3, range(1_000, 1_012))
    for _ in range(LIMITS.in_flight_stall_ms_max // 1_000 + 1):
        rig.tick(1_000)
        worker.admit(2, range(121))
        worker.heartbeat()
        other.heartbeat()
    assert code_of(worker.admit(2, range(121))) == "Busy"
    lease = other.granted(4, range(2_000, 2_004))
    assert code_of(other.extend(lease, 20)) == "Busy", "nor does growth wait for it"
    other.extended(lease, 2)
    assert worker.granted(5, range(20)).cached_tokens == 0, "what it keeps is computed"
    rig.load()
    other.release(lease)
    assert is_queued(worker.admit(2, range(121))), "and once it has answered it is asked again"


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
