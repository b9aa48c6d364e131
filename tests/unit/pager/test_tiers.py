"""The disk tier's decisions: what is kept, what is read, and what happens when it goes wrong."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from tests.unit.pager.disk_rig import (
    PROMPT,
    DiskRig,
    flood,
    prefixes_of,
    pushed,
    put_on_disk,
)
from tests.unit.pager.rig import (
    LIMITS,
    ROOT,
    Worker,
    fill_of,
    is_queued,
    key_of,
    order_of,
    table_of,
)
from tests.unit.pager.steps import cache

from pagemesh.pager.events import WriteHeaders
from pagemesh.pager.tiers.tier_events import LoadPages, StorePages
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.pager_messages import Admit, Granted
from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import pack

OTHER_ROOT = b"o" * 32


@pytest.fixture
def rig() -> DiskRig:
    return DiskRig(16)


def test_what_is_evicted_is_stored_before_its_pages_are_given_away(
    rig: DiskRig, worker: Worker
) -> None:
    cache(worker, 1, PROMPT)
    worker.granted(2, range(500, 501), reserve=64)
    kinds = [type(command) for command in rig.commands]
    assert kinds.index(StorePages) < kinds.index(WriteHeaders)
    rig.write()
    assert rig.prefixes() == prefixes_of(PROMPT)


def test_a_prompt_that_was_evicted_waits_for_the_disk_and_computes_only_its_end(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    assert is_queued(worker.admit(2, PROMPT))
    assert rig.core.books.pool.held == 4, "by the pager, until they are verified"
    [load] = rig.loads
    assert (rig.headers.writers[table_pages(load)] == 0).all()
    rig.now_ms += 7
    rig.load()
    [granted] = pushed(rig)
    assert granted.cached_tokens == 16
    assert table_of(granted)[:4] == table_pages(load)
    assert (rig.headers.states[table_pages(load)] == HeaderState.COMMITTED).all()
    waterfall = granted.waterfall
    assert (waterfall.fetched_tokens, waterfall.awaited_tokens, waterfall.awaited_ms) == (16, 0, 7)
    assert waterfall.delivered_tokens == 16


def table_pages(load: LoadPages) -> list[int]:
    return [int(page) for page in load.pages]


def test_all_who_ask_meanwhile_wait_for_the_same_read(rig: DiskRig, worker: Worker) -> None:
    put_on_disk(rig, worker, PROMPT)
    for number in range(2, 6):
        assert is_queued(worker.admit(number, [*PROMPT, number]))
    assert len(rig.loads) == 1
    rig.load()
    assert [one.key for one in pushed(rig)] == [key_of(number) for number in range(2, 6)]


def test_pages_are_read_beside_many_who_compute_them_and_may_not_be_waited_for() -> None:
    rig = DiskRig(64)
    worker = Worker(rig, "w", 1)
    short = range(5)
    cache(worker, 1, short)
    flood(worker)
    for number in range(20, 1, -1):  # not written yet, and each is older than those who compute
        worker.granted(number * 1_000_000, short)
    rig.write()
    assert is_queued(worker.admit(2, short))
    rig.load()
    [granted] = pushed(rig)
    assert granted.cached_tokens == 4


def test_what_follows_a_match_in_the_pool_is_read_from_disk(rig: DiskRig, worker: Worker) -> None:
    cache(worker, 1, PROMPT)
    held = worker.granted(2, range(9))  # keeps the first two pages
    rest = worker.granted(3, range(700, 701), reserve=4 * 13)
    worker.release(rest, cache=False)
    rig.write()
    assert rig.prefixes() == {pack(range(12)), pack(range(16))}
    assert is_queued(worker.admit(4, PROMPT))
    assert rig.loads[0].first_index == 2
    rig.load()
    [granted] = pushed(rig)
    assert granted.cached_tokens == 16 and table_of(granted)[:2] == table_of(held)[:2]
    assert granted.waterfall.fetched_tokens == 8


def test_what_is_on_disk_already_is_not_written_again(rig: DiskRig, worker: Worker) -> None:
    put_on_disk(rig, worker, PROMPT)
    worker.admit(2, PROMPT)
    rig.load()
    [granted] = pushed(rig)
    worker.release(granted, PROMPT)
    flood(worker, 901)
    assert not rig.stores
    assert rig.prefixes() == prefixes_of(PROMPT)


def test_a_record_that_is_damaged_is_computed_again_and_never_tried_again(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    worker.admit(2, PROMPT)
    rig.load(bad_at=2)
    [granted] = pushed(rig)
    assert granted.cached_tokens == 8 and granted.waterfall.fetched_tokens == 8
    assert rig.prefixes() == {pack(range(4)), pack(range(8))}
    disk = rig.core.books.disk
    assert disk is not None and disk.counts.corrupt == 1
    assert not rig.loads, "what follows cannot be read without it"


def test_what_is_computed_instead_of_damaged_records_is_stored_anew_whatever_follows_them(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    worker.admit(2, PROMPT)
    rig.load(bad_at=1)  # and nobody knows of those after it
    [granted] = pushed(rig)
    worker.release(granted, PROMPT)
    flood(worker, 901)
    [store] = rig.stores
    assert sorted(store.indexes) == [1, 2, 3]
    rig.write()
    assert rig.prefixes() == prefixes_of(PROMPT)


def test_when_the_disk_fails_while_it_reads_the_prompt_is_computed(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    worker.admit(2, PROMPT)
    rig.fail()
    assert rig.core.books.disk is None
    assert rig.core.books.pool.held == 4, "the reader may be at it still"
    rig.load(bad_at=0)
    [granted] = pushed(rig)
    assert granted.cached_tokens == 0 and not rig.core.books.loads
    worker.release(granted, PROMPT)
    flood(worker, 901)
    assert not rig.stores, "the tier is off"
    assert worker.granted(3, PROMPT).cached_tokens == 0


def test_a_disk_that_never_answers_is_waited_for_for_a_limited_time(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    worker.admit(2, PROMPT)
    for _ in range(LIMITS.in_flight_stall_ms_max // 500 + 2):
        rig.tick(500)
        worker.heartbeat()
        if not pushed(rig):
            worker.admit(2, PROMPT)
    assert worker.granted(2, PROMPT).cached_tokens == 0
    assert rig.core.books.pool.held == 4 + 5, "its pages stay with the reader"
    rig.load()
    assert rig.core.books.pool.held == 5


def test_reading_is_left_when_computing_is_quicker_and_the_waterfall_says_so(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    worker.admit(2, PROMPT)
    rig.load(took_us=400_000)
    [granted] = pushed(rig)
    worker.release(granted, PROMPT)
    fresh = worker.granted(3, range(100, 117))
    rig.now_ms += 2
    worker.release(fresh, range(100, 117))
    flood(worker, 901)
    granted = worker.granted(4, PROMPT)
    assert granted.cached_tokens == 0
    assert granted.waterfall.lost == {"on_disk": 16}
    assert granted.waterfall.available_tokens == 16
    worker.release(granted, PROMPT)
    flood(worker, 902)
    rig.now_ms += 61_000
    worker.open()
    assert is_queued(worker.admit(5, PROMPT)), "a minute later the disk gets another chance"


def test_what_is_in_memory_too_is_read_and_the_slower_rest_computed() -> None:
    rig = DiskRig(16, memory_pages=2)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, PROMPT)
    start = PROMPT[:9]
    for number, memory_count in ((2, 0), (3, 2)):  # from disk, and then from memory
        worker.admit(number, start)
        took_us = 20 if memory_count else 900_000
        rig.load(took_us=took_us, memory_count=memory_count, memory_us=20)
        [granted] = pushed(rig)
        worker.release(granted, start)
        flood(worker, 900 + number)
    disk = rig.core.books.disk
    assert disk is not None
    for _ in range(20):
        disk.cost.computed(16, 20)
    assert is_queued(worker.admit(5, PROMPT))
    assert [len(load.slots) for load in rig.loads] == [2]
    rig.load(took_us=20, memory_count=2, memory_us=20)
    [granted] = pushed(rig)
    assert granted.cached_tokens == 8
    assert granted.waterfall.lost == {"on_disk": 8}
    counts = disk.counts
    assert (counts.loaded, counts.from_memory, counts.declined) == (6, 4, 2)


def test_what_was_dropped_should_not_be_in_memory() -> None:
    rig = DiskRig(16, memory_pages=8)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, PROMPT)
    disk = rig.core.books.disk
    assert disk is not None and all(slot in disk.cost.recent for slot in rig.slots)
    worker.admit(2, PROMPT)
    [load] = rig.loads
    rig.load(bad_at=1)
    assert [slot in disk.cost.recent for slot in load.slots] == [True, False, False, False]


def test_the_least_recently_used_leave_the_disk_first_and_an_end_before_its_start() -> None:
    rig = DiskRig(16, slot_count=6)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, PROMPT)
    cache(worker, 2, range(50, 67))
    flood(worker, 901)
    rig.write()
    assert rig.prefixes() == prefixes_of(range(50, 67)) | {pack(range(4)), pack(range(8))}


def test_taking_the_slots_of_others_costs_little_more_than_taking_free_ones() -> None:
    rig = DiskRig(16, slot_count=40_000)
    disk = rig.core.books.disk
    assert disk is not None
    took_s = []
    for turn in range(3):
        started_s = time.process_time()
        for chain in range(turn * 40_000, (turn + 1) * 40_000, 100):
            _, slots, _ = disk.claim([*range(chain, chain + 100)], -1 - chain, ROOT)
            disk.written(slots)
        took_s.append(time.process_time() - started_s)
    assert max(took_s[1:]) < 8 * took_s[0], "a plain dictionary takes 20 times as long"


def test_no_more_waits_to_be_written_than_the_buffer_holds() -> None:
    rig = DiskRig(16, limits=replace(LIMITS, staged_bytes_max=3 << 12))
    worker = Worker(rig, "w", 1)
    cache(worker, 1, PROMPT)
    flood(worker)
    assert sum(len(store.slots) for store in rig.stores) == 3
    disk = rig.core.books.disk
    assert disk is not None and disk.counts.not_stored == 1
    rig.write()
    cache(worker, 2, range(50, 67))
    flood(worker, 901)
    assert rig.stores, "there is room in it again"


def test_what_is_on_disk_already_is_not_counted_as_not_stored() -> None:
    rig = DiskRig(16, limits=replace(LIMITS, staged_bytes_max=2 << 12))
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, range(9))
    worker.release(worker.granted(2, PROMPT, read_cache=False), PROMPT)
    cache(worker, 3, range(21))
    flood(worker, 901)
    disk = rig.core.books.disk
    assert disk is not None and disk.counts.not_stored == 1, "the third of five pages"


def test_the_disk_survives_the_pool_and_pages_of_another_root_are_not_found(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    rig.restart_with_an_empty_pool()
    worker = Worker(rig, "w", 2)
    answer = worker.admit(2, PROMPT, root=OTHER_ROOT)
    assert isinstance(answer, Granted) and answer.cached_tokens == 0
    assert is_queued(worker.admit(3, PROMPT))
    rig.load()
    [granted] = pushed(rig)
    assert granted.cached_tokens == 16


def test_pages_that_somebody_else_computed_meanwhile_are_not_committed_twice(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    assert is_queued(worker.admit(9, PROMPT))
    # One that may not read the cache computes the same, and commits it first.
    lease = worker.granted(1, PROMPT, read_cache=False)
    worker.release(lease, PROMPT)
    idle = rig.core.books.pool.idle
    rig.load()
    [granted] = pushed(rig)
    assert granted.cached_tokens == 16
    worker.release(granted, PROMPT)
    assert rig.core.books.pool.idle == idle, "the copies are free again"


def test_nothing_is_read_for_a_prompt_that_may_not_read_the_cache(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    assert worker.granted(2, PROMPT, read_cache=False).cached_tokens == 0
    assert not rig.loads


def test_a_prompt_for_which_there_is_no_room_reads_nothing_until_there_is(
    rig: DiskRig, worker: Worker
) -> None:
    cache(worker, 1, PROMPT)
    holder = worker.granted(2, range(300, 301), reserve=4 * 14)
    rig.write()
    younger = Admit(
        key=key_of(3), order=order_of(3), worker="w", incarnation=1, epoch=rig.epoch, root=ROOT,
        tokens=pack(PROMPT), reserve_tokens=len(PROMPT), deadline_ms=60_000,
    )  # fmt: skip
    assert is_queued(rig.ask(younger)) and not rig.loads
    worker.release(holder, cache=False)
    assert rig.loads
    rig.load()
    assert [one.cached_tokens for one in pushed(rig)] == [16]


def test_what_is_evicted_for_a_read_does_not_take_the_slots_that_are_read() -> None:
    rig = DiskRig(8, slot_count=4)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, PROMPT)
    cache(worker, 2, range(50, 82))
    assert is_queued(worker.admit(3, PROMPT))
    rig.write()
    rig.load()
    assert [one.cached_tokens for one in pushed(rig)] == [16]


def test_a_growing_lease_commits_below_what_was_read(rig: DiskRig, worker: Worker) -> None:
    put_on_disk(rig, worker, PROMPT)
    worker.admit(2, PROMPT, reserve=32)
    rig.load()
    [granted] = pushed(rig)
    longer = range(25)
    worker.commit(granted, fill_of(longer))
    worker.release(granted, longer)
    flood(worker, 901)
    rig.write()
    assert rig.prefixes() == prefixes_of(longer)


def test_what_is_over_in_the_pool_is_not_read_from_disk_before_it_has_left(
    rig: DiskRig, worker: Worker
) -> None:
    """It could not take its place, and would be read again and again."""
    put_on_disk(rig, worker, PROMPT)
    timed = worker.granted(3, PROMPT, terms=CacheTerms(ttl_s=1), read_cache=False)
    worker.release(timed, PROMPT)
    rig.now_ms += 1_001
    granted = worker.granted(4, PROMPT)
    assert granted.cached_tokens == 0 and not rig.loads


def test_a_page_with_the_last_token_is_not_read_since_that_is_computed(
    rig: DiskRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    assert is_queued(worker.admit(2, PROMPT[:16]))
    assert [len(load.slots) for load in rig.loads] == [3]
