"""What is on disk can be found: by way of all that comes before it, there or in the pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.pager.disk_rig import (
    PROMPT,
    DiskRig,
    flood,
    prefixes_of,
    pushed,
    put_on_disk,
)
from tests.unit.pager.rig import LIMITS, ROOT, Worker, is_queued
from tests.unit.pager.steps import OTHER, cache, invalidated
from tests.unit.pager.test_disk_quotas import records_of, store, tier
from tests.unit.pager.test_followers import in_a_row
from xxhash import xxh3_64_intdigest

from pagemesh.pager.events import Command, Sweep
from pagemesh.pager.limits import PagerLimits, PoolFacts
from pagemesh.pager.tiers import chain_keys, storing
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.tier_events import (
    DiskFound,
    ForgetSlots,
    FoundRecords,
    PagesNotTaken,
    PutAway,
    StorePages,
)
from pagemesh.pager.tree.leaving import Why
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.tokens import pack

MIB = 1 << 20


def rig_with(staged_pages: int, page_count: int = 16, slot_count: int = 64) -> DiskRig:
    return DiskRig(
        page_count, slot_count, limits=replace(LIMITS, staged_bytes_max=staged_pages << 12)
    )  # fmt: skip


def disk_of(rig: DiskRig) -> DiskTier:
    rig.core.tiers.check()
    disk = rig.core.books.disk
    assert disk is not None
    return disk


@pytest.mark.parametrize(("staged_pages", "found_pages"), [(1_000, 40), (16, 16), (4, 4)])
def test_of_a_document_that_waits_in_too_small_a_buffer_the_start_is_found_again(
    staged_pages: int, found_pages: int
) -> None:
    rig = rig_with(staged_pages, page_count=64, slot_count=256)
    worker = Worker(rig, "w", 1)
    document = range(1_000, 1_000 + 4 * 40 + 1)
    cache(worker, 1, document)
    for number in range(2, 6):  # each drives out 32 pages at once
        other = range(100_000 * number, 100_000 * number + 4 * 32 + 1)
        lease = worker.granted(number, other)
        rig.write()
        worker.release(lease, other)
        rig.write()
    disk_of(rig).cost.prefill_tokens_per_ms = 0.0  # of what is not known all is read
    assert is_queued(worker.admit(9, document))
    for _ in range(2):  # half of the pool at a time
        rig.load()
    [granted] = pushed(rig)
    assert granted.cached_tokens == 4 * found_pages
    assert prefixes_of(document) & rig.prefixes() == prefixes_of(document[: 4 * found_pages])


def drive_out(worker: Worker, number: int, page_count: int) -> None:
    """Want so many pages more than are free, for something that is not kept."""
    free = worker.rig.core.books.pool.free
    lease = worker.granted(number, [number], reserve=4 * (free + page_count))
    worker.release(lease, cache=False)


def test_what_is_on_disk_already_goes_when_what_it_follows_is_not_stored() -> None:
    rig = rig_with(2)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    held = worker.granted(2, range(9))  # keeps the first two pages
    flood_beside(rig, worker, held_pages=3)
    rig.write()
    assert rig.prefixes() == prefixes_of(PROMPT) - prefixes_of(range(8))
    cache(worker, 3, range(50, 67))
    flood_beside(rig, worker, held_pages=3)  # the buffer is full again
    worker.release(held, cache=False)
    flood(worker)
    assert disk_of(rig).counts.cut_off == 2
    rig.write()
    assert not rig.prefixes() & prefixes_of(PROMPT)


def flood_beside(rig: DiskRig, worker: Worker, held_pages: int) -> None:
    """As ``flood``, beside a lease that stays."""
    reserve = 4 * (rig.page_count - held_pages)
    worker.release(worker.granted(901, [901], reserve=reserve), cache=False)


def test_what_waits_to_be_written_is_not_when_what_it_follows_is_not_stored() -> None:
    rig = rig_with(2)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    held = worker.granted(2, range(9))
    flood_beside(rig, worker, held_pages=3)
    [store] = rig.stores
    assert store.indexes == (2, 3)
    worker.release(held, cache=False)
    flood(worker)
    assert rig.skipped == {*store.slots}
    rig.write()
    assert not rig.prefixes() and disk_of(rig).page_count == 0


def test_a_slot_is_never_taken_from_a_page_that_others_follow() -> None:
    disk = tier(4)
    disk.written(disk.claim([1, 2], 0, ROOT).slots)
    disk.written(disk.claim([3], 2, ROOT).slots)  # was used later than what it follows
    assert store(disk, range(20, 22), OTHER) == 2
    assert disk.find(ROOT, 3) is None and disk.find(ROOT, 1) is not None


def test_pages_that_follow_one_another_are_dropped_with_each_other() -> None:
    """Keys are hashes, and two pages of a prompt may have the same."""
    numbers = np.array([1, 2], np.uint64)
    records = FoundRecords(
        np.array([0, 1], np.uint32), numbers, numbers[::-1], np.zeros(2, np.intp), (ROOT,)
    )
    disk = tier(4, records)
    first = disk.find(ROOT, 1)
    assert first is not None and [one.chain for one in disk.drop_all([first])] == [1, 2]
    disk.check()
    assert disk.page_count == 0


@pytest.mark.parametrize("is_older", [True, False])
def test_of_a_page_that_two_slots_have_none_is_found_again_when_it_is_invalidated(
    is_older: bool,
) -> None:
    """A writer leaves that which dies before it comes to the page that gets the first slot."""
    rig = rig_with(64)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, PROMPT)
    twice = {63: next(iter(rig.slots.values()))}
    rig.slots = twice | rig.slots if is_older else rig.slots | twice
    rig.restart_with_an_empty_pool()
    assert len(rig.slots) == 4 and (63 in rig.slots) == (not is_older)
    invalidated(rig, "root", ROOT.hex())
    assert not rig.slots and not rig.kept
    rig.restart_with_an_empty_pool()
    assert disk_of(rig).page_count == 0


def test_where_slots_are_fewer_than_pages_the_start_of_a_run_gets_them() -> None:
    disk = tier(3)
    claimed = disk.claim([1, 2, 3, 4, 5], 0, ROOT)
    assert claimed.places == [0, 1, 2] and len(set(claimed.slots)) == 3
    disk.check()
    assert disk.counts.not_stored == 2


def test_what_follows_pages_that_nobody_could_copy_is_dropped_with_them() -> None:
    rig = rig_with(64)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    held = worker.granted(2, range(9))
    flood_beside(rig, worker, held_pages=3)
    rig.write()
    assert disk_of(rig).page_count == 2
    worker.release(held)
    flood(worker)
    rig.handle(PagesNotTaken(rig.stores.pop().slots))
    assert disk_of(rig).page_count == 0 and not rig.prefixes()


def test_while_nobody_copies_pages_those_on_disk_already_are_not_counted_as_not_stored() -> None:
    rig = rig_with(64)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, range(9))
    worker.release(worker.granted(2, PROMPT, read_cache=False), PROMPT)
    cache(worker, 3, range(500, 505))
    drive_out(worker, 4, 1)
    rig.handle(PagesNotTaken(rig.stores.pop().slots))
    before = disk_of(rig).counts.not_stored
    flood(worker, 5)
    assert not rig.stores and disk_of(rig).counts.not_stored - before == 2


def test_what_follows_pages_that_a_tenant_lost_to_its_quota_is_dropped() -> None:
    """These are not stored."""
    rig = rig_with(64)
    worker = Worker(rig, "w", 1)
    terms = CacheTerms(tenant="alice", pages_max=6)
    worker.release(worker.granted(1, PROMPT, root=OTHER, terms=terms), PROMPT)
    worker.release(worker.granted(2, range(500, 501), reserve=4 * 14), cache=False)
    rig.write()
    assert disk_of(rig).page_count == 2
    longer = range(700, 721)
    worker.release(worker.granted(3, longer, root=OTHER, terms=terms), longer)
    flood(worker, 904)
    assert rig.core.books.forest.left_pages[Why.QUOTA] == 2
    disk_of(rig)
    rig.write()
    assert not rig.prefixes(OTHER) & prefixes_of(PROMPT)


def test_a_pager_that_finds_an_end_without_its_start_forgets_it_unless_the_pool_has_that() -> None:
    rig = rig_with(64)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    drive_out(worker, 2, 2)
    rig.write()
    assert rig.prefixes() == prefixes_of(PROMPT) - prefixes_of(range(8))
    rig.restart()
    rig.open()
    assert disk_of(rig).page_count == 2, "the pool has what they follow"
    rig.restart_with_an_empty_pool()
    assert disk_of(rig).page_count == 0 and not rig.prefixes()


def test_ends_without_their_starts_are_looked_for_in_a_part_of_the_pool_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storing, "_LOOKED_PAGES_MAX", 1)
    rig, lost = rig_with(64), range(50, 67)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, lost)
    del rig.slots[next(slot for slot, (at, _) in rig.slots.items() if len(at[1]) == rig.width)]
    cache(worker, 2, PROMPT)
    drive_out(worker, 3, 2)
    rig.write()
    for number in (4, 5, 6):  # edges of their own, in what is free
        cache(worker, number, [number, *range(3)])
    rig.restart()
    rig.open()
    disk, turns = disk_of(rig), 0
    while rig.core.is_sweeping:
        assert disk.page_count == 5, "it is not known yet what they follow"
        if turns == 1:
            late = worker.granted(7, [*range(4), 9]) if worker.open() else None
            assert late is not None and late.cached_tokens == 4, "an edge is cut meanwhile"
        rig.handle(Sweep())
        turns += 1
    assert turns >= 3 and disk_of(rig).page_count == 2
    assert rig.prefixes() == prefixes_of(PROMPT) - prefixes_of(range(8))


MANY = 3_000


@pytest.mark.parametrize(
    ("records", "first"),
    [
        pytest.param(records_of([*range(MANY)], [*range(1, MANY + 1)]), 1_024, id="many ends"),
        pytest.param(in_a_row(MANY, before=1 << 40), 1_025, id="all that follows one"),
    ],
)
def test_of_ends_without_their_starts_a_pager_forgets_some_a_turn(
    records: FoundRecords, first: int
) -> None:
    rig = rig_with(64)
    rig.restart()
    disk = tier(MANY, records)
    rig.handle(DiskFound(disk, 0))
    left = [disk.page_count]
    while rig.core.is_sweeping:
        rig.handle(Sweep())
        left.append(disk.page_count)
    assert left == [MANY - first, MANY - first - 1_024, 0] and disk.counts.cut_off == MANY


@pytest.mark.parametrize("last", ["released", "died", "expired"])
def test_who_ends_under_a_retired_root_leaves_what_was_stored_since_under_the_same(
    last: str,
) -> None:
    rig = rig_with(64)
    worker, old = Worker(rig, "w", 1), Worker(rig, "old", 2)
    terms = CacheTerms(ttl_s=1) if last == "expired" else CacheTerms()
    lease = old.granted(1, PROMPT, terms=terms)
    old.committed(lease, PROMPT)
    invalidated(rig, "root", ROOT.hex())
    cache(worker, 2, PROMPT)
    flood_beside(rig, worker, held_pages=5)
    rig.write()
    assert rig.prefixes() == prefixes_of(PROMPT)
    if last == "died":
        rig.die(2)
    else:
        old.release(lease, PROMPT)
    rig.tick(2_000)
    assert not rig.core.books.forest.retired, "the old tree is gone"
    assert rig.prefixes() == prefixes_of(PROMPT) and disk_of(rig).page_count == 4
    assert disk_of(rig).counts.invalidated == 0


def test_a_slot_is_forgotten_before_it_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, told = rig_with(1), list[object]()
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    drive_out(worker, 2, 2)
    rig.write()
    perform = rig.perform

    def noted(command: Command) -> None:
        told.append(command)
        perform(command)

    monkeypatch.setattr(rig, "perform", noted)
    flood(worker)
    [forgotten] = [one for one in told if isinstance(one, ForgetSlots)]
    [store] = [one for one in told if isinstance(one, StorePages)]
    assert forgotten.slots == store.slots and told.index(forgotten) < told.index(store)
    rig.write()
    assert rig.prefixes() == {pack(range(4))}


def test_a_long_edge_that_is_evicted_bit_by_bit_is_hashed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = rig_with(1_000, page_count=608, slot_count=1_000)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, range(4 * 600))
    [node] = rig.core.books.forest.trees[ROOT].root.children.values()
    hashed = list[int]()

    def counting(data: bytes, seed: int) -> int:
        hashed.append(len(data))
        return xxh3_64_intdigest(data, seed)

    monkeypatch.setattr(chain_keys, "xxh3_64_intdigest", counting)
    rig.core.books.out = []
    for _ in range(100):
        rig.core.books.forest.trim(node, 6, Why.EVICTED)
    assert len(hashed) <= 600
    stores = [one for one in rig.core.books.out if isinstance(one, StorePages)]
    assert [one.indexes[0] for one in stores] == [*range(594, -1, -6)]
    for one in stores:
        rig._check_chains(one)


@pytest.mark.parametrize(
    ("page_bytes", "pool_pages", "staged_pages"),
    [(64 << 10, 100_000, 1_024), (4 * MIB, 1_000, 128), (4 * MIB, 160, 80), (32 * MIB, 400, 32),
     (256 * MIB, 2, 1)],
)  # fmt: skip
def test_what_may_wait_to_be_written_goes_by_the_size_of_a_page_within_bounds(
    page_bytes: int, pool_pages: int, staged_pages: int
) -> None:
    facts = PoolFacts("host", 1, 7, pool_pages, 16, page_bytes, b"l" * 32, "/pool")
    assert PagerLimits().staged_pages_max(facts) == staged_pages
    assert PagerLimits(staged_bytes_max=10 * page_bytes).staged_pages_max(facts) == 10


@pytest.mark.parametrize("is_in_use", [False, True])
def test_what_is_invalidated_while_it_is_put_away_is_not_stored(is_in_use: bool) -> None:
    """Under the root's name it would be what a later tree of that root finds."""
    rig = rig_with(staged_pages=2, page_count=32)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    if is_in_use:
        worker.granted(2, PROMPT)
    rig.handle(PutAway(anew=True))
    assert len(rig.stores) == 1, "there is room for no more until it is written"
    invalidated(rig, "root", ROOT.hex())
    rig.write()
    rig.handle(PutAway())
    assert not rig.stores and not rig.prefixes()


def test_the_rest_of_what_is_put_away_is_stored_though_the_first_has_left() -> None:
    rig = rig_with(staged_pages=2, page_count=32)
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    cache(worker, 2, range(100, 117), root=OTHER)
    rig.handle(PutAway(anew=True))
    first = rig.stores[0].root
    invalidated(rig, "root", first.hex())
    for _ in range(4):
        rig.write()
        rig.handle(PutAway())
    rest = OTHER if first == ROOT else ROOT
    assert len(rig.prefixes(rest)) == 4 and not rig.prefixes(first)
