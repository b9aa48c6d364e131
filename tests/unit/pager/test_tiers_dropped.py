"""What leaves the disk tier, and what goes there when the pager stops."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from tests.unit.pager.disk_rig import (
    PROMPT,
    DiskRig,
    fetched,
    flood,
    prefixes_of,
    pushed,
    put_on_disk,
)
from tests.unit.pager.rig import LIMITS, ROOT, Rig, Worker, is_queued
from tests.unit.pager.steps import OTHER, cache, invalidated

from pagemesh.pager.events import Holder
from pagemesh.pager.tiers.tier_events import (
    DiskOpening,
    PagesLoaded,
    PutAway,
    RememberRetired,
)
from pagemesh.wire.cache_messages import CacheInvalidated, InvalidateCache
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.tokens import pack


@pytest.fixture
def rig() -> DiskRig:
    return DiskRig(16)


def test_an_invalidated_root_is_dropped_from_disk_and_from_what_is_being_read(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    assert is_queued(worker.admit(2, PROMPT))
    assert invalidated(rig, "root", ROOT.hex()).root_count == 1
    assert not rig.prefixes()
    [load] = rig.loads
    [granted] = pushed(rig)
    assert granted.cached_tokens == 0, "it waits no longer"
    rig.handle(PagesLoaded(load.load, 4, 100))
    assert not rig.core.books.pool.idle, "what was read is not used"
    disk = rig.core.books.disk
    assert disk is not None and disk.page_count == 0
    worker.release(granted, PROMPT)
    flood(worker, 901)
    rig.write()
    assert rig.prefixes() == prefixes_of(PROMPT), "what is computed anew is kept again"


def test_the_cached_start_of_what_is_being_read_is_used_and_no_more_told_when_it_is_invalidated(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    cache(worker, 2, PROMPT[:9], read_cache=False)
    assert is_queued(worker.admit(3, PROMPT)) and rig.loads
    assert len(rig.cached) == 2
    assert invalidated(rig, "root", ROOT.hex()).used_pages == 2
    assert not rig.cached, "routers would send others there"


@pytest.mark.parametrize("has_failed", [False, True])
def test_pages_that_were_not_to_be_kept_do_not_come_from_disk_though_the_tier_was_not_on(
    rig: DiskRig, worker: Worker, has_failed: bool
) -> None:
    cache(worker, 1, PROMPT)
    cache(worker, 2, PROMPT, root=OTHER)
    rig.handle(PutAway(anew=True))
    rig.write()
    if has_failed:
        rig.fail()
    else:
        rig.restart()
        rig.handle(DiskOpening())
    worker = Worker(rig, "w", 2)
    for number in (3, 4):  # the second time nothing has to be written down
        granted = worker.granted(number, PROMPT)
        worker.release(granted, PROMPT, cache=False)
        kept = [one for one in rig.commands if isinstance(one, RememberRetired)]
        assert len(kept) == (number == 3)
    if has_failed:
        rig.restart()
        worker = Worker(rig, "w", 3)
    rig.open()
    assert not rig.prefixes() and len(rig.prefixes(OTHER)) == 4
    assert worker.granted(5, PROMPT).cached_tokens == 0
    assert not rig.kept, "it is forgotten, and need not be remembered any more"


def test_without_a_disk_nothing_is_written_down_of_pages_that_were_not_to_be_kept() -> None:
    rig = Rig(16)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    worker.release(worker.granted(2, PROMPT), cache=False)
    assert not any(isinstance(one, RememberRetired) for one in rig.commands)


def test_what_is_being_written_when_its_root_is_invalidated_is_not_found_again(
    rig: DiskRig, worker: Worker
) -> None:
    cache(worker, 1, PROMPT)
    flood(worker)
    assert invalidated(rig, "root", ROOT.hex()).root_count == 1
    rig.write()
    assert not rig.prefixes()
    assert worker.granted(2, PROMPT).cached_tokens == 0


def test_a_pager_that_dies_before_it_is_written_does_not_bring_an_invalidated_root_back(
    rig: DiskRig, worker: Worker
) -> None:
    cache(worker, 1, PROMPT)
    flood(worker)
    assert invalidated(rig, "root", ROOT.hex()).root_count == 1
    rig.write(dies=True)
    assert not rig.prefixes()


def test_what_is_being_read_when_all_that_is_idle_is_dropped_is_not_cached_by_it(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    assert is_queued(worker.admit(2, PROMPT))
    invalidated(rig, "idle")
    [load] = rig.loads
    [granted] = pushed(rig)
    assert granted.cached_tokens == 0
    rig.handle(PagesLoaded(load.load, 4, 100))
    assert rig.core.report().idle_pages == rig.core.report().pinned_pages == 0


def test_what_hangs_below_an_edge_that_got_shorter_is_stored_where_it_is_found(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, range(500, 517))
    cache(worker, 2, PROMPT)
    cache(worker, 3, [*range(16), *range(60, 65)])  # looked for on disk from where its match ends
    worker.release(worker.granted(4, [900], reserve=4 * 14), cache=False)
    rig.write()
    assert rig.prefixes() >= {pack(range(12)), pack(range(16))}
    other = [*range(8), *range(50, 59)]
    cache(worker, 5, other)
    flood(worker)
    rig.write()
    assert is_queued(worker.admit(6, other))
    [load] = rig.loads
    assert len(load.slots) == 4


def test_what_an_edge_lost_at_its_end_is_found_on_disk(rig: DiskRig, worker: Worker) -> None:
    put_on_disk(rig, worker, range(100, 117))
    cache(worker, 1, PROMPT)
    longer = worker.granted(2, [*PROMPT[:16], *range(500, 510)])  # has its key looked at
    worker.release(longer)
    rest = worker.granted(3, [700], reserve=4 * 14)
    worker.release(rest, cache=False)
    rig.write()
    assert is_queued(worker.admit(4, PROMPT))
    assert rig.loads[0].first_index == 2


@pytest.mark.parametrize(("what", "name"), [("root", ROOT.hex()), ("model", "any"), ("idle", "")])
def test_what_is_only_on_disk_is_invalidated_too(
    rig: DiskRig, worker: Worker, what: Literal["root", "model", "idle"], name: str
) -> None:
    put_on_disk(rig, worker, PROMPT)
    rig.restart_with_an_empty_pool()
    assert invalidated(rig, what, name).root_count == (0 if what == "idle" else 1)
    assert not rig.prefixes()


def test_of_many_roots_that_are_only_on_disk_an_answer_lists_a_part_and_counts_all(
    rig: DiskRig,
) -> None:
    rig.slot_count = 600
    rig.slots = {slot: ((slot.to_bytes(32), b""), slot) for slot in range(600)}
    rig.restart_with_an_empty_pool()
    answer = rig.ask(InvalidateCache(what="model", name="any"))
    assert isinstance(answer, CacheInvalidated)
    assert (answer.root_count, answer.unknown_root_count, len(answer.roots)) == (600, 600, 500)
    assert not rig.slots


def put_away(rig: DiskRig) -> int:
    """Stop the pager; how many times the buffer was filled."""
    for turn in range(100):
        rig.handle(PutAway())
        if not rig.stores:
            return turn
        rig.write()
    raise AssertionError("it never ends")


def test_a_pager_that_is_told_to_stop_stores_what_is_cached_the_start_of_prefixes_first() -> None:
    rig = DiskRig(32, limits=replace(LIMITS, staged_bytes_max=3 << 12))
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    other = range(50, 67)
    cache(worker, 2, other)
    branch = [*range(8), 70, 71, 72, 73, 74]
    worker.release(worker.granted(3, branch), branch)
    assert put_away(rig) == 3, "nine pages, three at a time"
    assert rig.prefixes() == prefixes_of(PROMPT) | prefixes_of(other) | {pack(branch[:12])}
    rig.restart_with_an_empty_pool()
    worker = Worker(rig, "w", 2)
    assert is_queued(worker.admit(4, branch))
    rig.load()
    assert [one.cached_tokens for one in pushed(rig)] == [12]


def test_a_small_disk_keeps_the_starts_of_prefixes_when_the_pager_stops() -> None:
    rig = DiskRig(32, slot_count=3)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    put_away(rig)
    assert rig.prefixes() == prefixes_of(range(12))


def test_no_more_is_put_away_than_the_disk_has_slots_for() -> None:
    rig = DiskRig(16, slot_count=4)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    cache(worker, 2, range(100, 117))
    stored_count = 0
    for anew in (True, False, False):
        rig.handle(PutAway(anew))
        stored_count += sum(len(one.slots) for one in rig.stores)
        rig.write()
    assert stored_count == 4


def test_when_the_pager_stops_nobody_drives_out_what_was_stored_before() -> None:
    """Though each tenant has had less than it may."""
    rig = DiskRig(32, slot_count=3, limits=replace(LIMITS, staged_bytes_max=2 << 12))
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    cache(worker, 2, PROMPT, root=OTHER, terms=CacheTerms(tenant="alice", disk_pages_max=3))
    put_away(rig)
    disk = rig.core.books.disk
    assert disk is not None and disk.page_count == 3
    assert (disk.counts.evicted, disk.counts.over_quota) == (0, 0)


def test_what_has_a_time_to_live_is_never_put_on_disk(rig: DiskRig, worker: Worker) -> None:
    """A record has none, so that it would be served after its time."""
    timed = worker.granted(1, PROMPT, terms=CacheTerms(ttl_s=60))
    worker.release(timed, PROMPT)
    rig.handle(PutAway(anew=True))
    flood(worker)
    rig.write()
    assert not rig.prefixes() & prefixes_of(PROMPT)
    assert worker.granted(2, PROMPT).cached_tokens == 0


@pytest.mark.parametrize("state", ["on", "opening", "off"])
@pytest.mark.parametrize("is_evicted", [False, True])
def test_pages_that_were_not_to_be_kept_do_not_come_back_though_they_could_not_leave_at_once(
    rig: DiskRig, worker: Worker, state: str, is_evicted: bool
) -> None:
    granted = fetched(rig, worker)
    worker.release(granted, PROMPT)
    rig.restart([Holder(77, "another", "lock")])  # who may read them, and has not declared
    if state == "on":
        rig.open()
    else:
        rig.handle(DiskOpening())
    if state == "off":
        rig.fail()
    worker = Worker(rig, "w", 2)
    granted = worker.granted(9, PROMPT)
    assert granted.cached_tokens == 16
    worker.release(granted, cache=False)
    rig.die(77)
    if is_evicted:
        flood(worker)
    for _ in range(2):
        rig.tick(2_000)
    if state == "off":
        rig.restart()
    if state != "on":
        rig.open()
    rig.write()
    assert not rig.prefixes()


def test_what_a_disk_that_fails_may_not_have_forgotten_is_not_found_by_the_next_pager(
    rig: DiskRig, worker: Worker
) -> None:
    granted = fetched(rig, worker)
    kept = dict(rig.slots)
    worker.release(granted, cache=False)
    rig.slots.update(kept)  # it was told to forget them, and could not
    rig.fail()
    rig.restart()
    rig.open()
    assert not rig.prefixes()


def test_what_gave_its_slots_to_pages_that_a_failing_disk_never_wrote_is_not_found_either() -> None:
    rig = DiskRig(16, slot_count=4)
    worker = Worker(rig, "w", 1)
    granted = fetched(rig, worker)
    cache(worker, 3, range(100, 117))
    reserve = 4 * (rig.core.books.pool.free + 4)
    worker.release(worker.granted(4, [900], reserve=reserve), cache=False)
    [store] = rig.stores
    assert {*store.slots} == {*rig.slots}, "until they are written the slots hold what they held"
    worker.release(granted, cache=False)
    rig.fail()
    rig.restart()
    rig.open()
    assert not rig.prefixes()


def test_a_disk_that_hangs_while_it_reads_leaves_room_to_compute() -> None:
    rig = DiskRig(32)
    worker = Worker(rig, "w", 1)
    one, other = range(100, 161), range(500, 561)  # of 15 pages each, and the pool has 32
    put_on_disk(rig, worker, one)
    put_on_disk(rig, worker, other)
    for number, prompt in ((10, one), (11, other)):
        worker.admit(number, prompt)
    reading = sum(len(load.pages) for load in rig.core.books.loads.values())
    assert 15 <= reading <= 16
    assert not is_queued(worker.admit(12, range(900, 930)))


def test_a_disk_that_stands_still_is_asked_for_nothing_more(rig: DiskRig, worker: Worker) -> None:
    other = range(100, 117)
    put_on_disk(rig, worker, PROMPT)
    put_on_disk(rig, worker, other)
    assert is_queued(worker.admit(2, PROMPT))
    rig.now_ms += LIMITS.mover_slow_ms + 1
    worker.granted(3, other)
    assert len(rig.loads) == 1
