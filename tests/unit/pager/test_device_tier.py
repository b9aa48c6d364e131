"""Pages on a device and the disk: what a worker moves is nobody else's until it is done, and what
it does not move was never stored."""

from __future__ import annotations

import pytest
from tests.unit.pager.disk_rig import PROMPT, DiskRig, flood, pushed, put_on_disk
from tests.unit.pager.rig import LIMITS, ROOT, Worker, is_queued
from tests.unit.pager.steps import cache

from pagemesh.pager.events import ForgetHolder, Holder
from pagemesh.pager.pages.runs import table_of
from pagemesh.pager.tiers.tier_events import ForgetSlots, PagesLoaded, PagesNotTaken, PutAway
from pagemesh.wire.cache_messages import InvalidateCache
from pagemesh.wire.pager_messages import Declare
from pagemesh.wire.pool_format import HeaderState


class DeviceRig(DiskRig):
    place = "device"


@pytest.fixture
def rig() -> DeviceRig:
    return DeviceRig(16)


@pytest.fixture
def worker(rig: DeviceRig) -> Worker:
    return Worker(rig, "w", 5)


def declare_nothing(worker: Worker) -> None:
    worker._ask(
        Declare(
            worker=worker.name, incarnation=worker.incarnation, epoch=worker.rig.epoch, number=1,
            part=0, parts=1, leases=[],
        )
    )  # fmt: skip


def test_pages_are_filled_by_whoever_asks_for_them_and_held_in_its_name(
    rig: DeviceRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    other = Worker(rig, "other", 6)
    assert is_queued(other.admit(2, PROMPT))
    [load] = rig.loads
    assert load.mover == 6
    assert (rig.headers.writers[table_of(load.pages)] == 6).all()
    rig.die(6)
    assert (rig.headers.states[table_of(load.pages)] == HeaderState.HELD).all(), "it may be at it"
    assert is_queued(worker.admit(3, PROMPT))
    rig.load()
    assert [one.cached_tokens for one in pushed(rig)] == [16]


def test_after_a_restart_they_are_free_when_the_worker_has_said_what_it_holds(
    rig: DeviceRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    assert is_queued(worker.admit(2, PROMPT))
    pages = table_of(rig.loads.pop().pages)
    rig.restart([Holder(5, "w", "lock-5")])
    assert (rig.headers.states[pages] == HeaderState.HELD).all()
    assert rig.core.books.pool.draining == 4, "it may be filling them still"
    worker.open()
    assert rig.core.books.pool.draining == 4
    declare_nothing(worker)
    assert rig.core.books.pool.draining == 0
    assert (rig.headers.states[pages] == HeaderState.FREE).all()


def test_a_worker_that_fills_pages_is_remembered_though_its_session_is_over(
    rig: DeviceRig, worker: Worker
) -> None:
    """Else the next pager would not know that it may be writing."""
    put_on_disk(rig, worker, PROMPT)
    other = Worker(rig, "other", 6)
    assert is_queued(worker.admit(2, PROMPT))
    told = [command for ms in range(3) for command in rig.tick(10_000 * ms)]
    assert ForgetHolder(6) in told and ForgetHolder(5) not in told
    rig.loads.clear()
    load = rig.core.books.loads.popitem()[1]
    rig.core.books.loads[load.id] = load
    rig.handle(PagesLoaded(load.id, 4, 100))
    assert ForgetHolder(5) in rig.tick(1)
    assert other.incarnation not in rig.core.books.sessions


@pytest.mark.parametrize("good", [0, 2])
def test_what_a_worker_does_not_fill_is_computed_and_it_is_left_alone_for_a_while(
    rig: DeviceRig, worker: Worker, good: int
) -> None:
    put_on_disk(rig, worker, PROMPT)
    other = Worker(rig, "other", 6)
    assert is_queued(worker.admit(2, PROMPT))
    load = rig.loads.pop()
    rig.handle(PagesLoaded(load.load, good, 100))
    assert not rig.loads
    [granted] = pushed(rig)
    assert granted.cached_tokens == 4 * good
    assert rig.core.books.pool.held == 5 - good
    worker.release(granted)
    assert worker.granted(3, PROMPT).cached_tokens == 4 * good
    assert good or is_queued(other.admit(4, PROMPT)), "the other one may well do it"


def test_a_worker_that_has_been_at_it_for_long_is_given_no_more(
    rig: DeviceRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    cache(worker, 5, range(200, 209))
    flood(worker, 905)
    rig.write()
    assert is_queued(worker.admit(2, PROMPT))
    rig.now_ms += LIMITS.mover_rest_ms
    assert worker.granted(3, range(200, 209)).cached_tokens == 0
    assert len(rig.loads) == 1


def test_nothing_is_given_up_on_disk_for_pages_that_nobody_copies(
    rig: DeviceRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, PROMPT)
    cache(worker, 2, range(100, 117))
    flood(worker, 901)
    not_taken(rig)
    cache(worker, 3, range(200, 217))
    flood(worker, 902)
    disk = rig.core.books.disk
    assert disk is not None
    assert not rig.stores and disk.counts.not_stored == 8
    rig.now_ms += LIMITS.mover_rest_ms
    cache(worker, 4, range(300, 317))
    flood(worker, 903)
    assert len(rig.stores) == 1


def test_a_pager_that_ends_asks_all_the_same(rig: DeviceRig, worker: Worker) -> None:
    cache(worker, 1, PROMPT)
    flood(worker)
    not_taken(rig)
    cache(worker, 2, PROMPT)
    rig.handle(PutAway(anew=True))
    assert len(rig.stores) == 1


def not_taken(rig: DeviceRig) -> list[int]:
    """Nobody copied the pages out. The slots that the disk is to forget then."""
    slots = [slot for store in rig.stores for slot in store.slots]
    rig.stores = []
    commands = rig.handle(PagesNotTaken(tuple(slots)))
    return [slot for c in commands if isinstance(c, ForgetSlots) for slot in c.slots]


def test_what_nobody_copied_is_not_on_disk_and_its_slots_are_free(
    rig: DeviceRig, worker: Worker
) -> None:
    put_on_disk(rig, worker, range(100, 117))
    disk = rig.core.books.disk
    assert disk is not None
    cache(worker, 2, PROMPT)
    flood(worker, 901)
    assert len(disk.staged) == 4
    assert len(not_taken(rig)) == 4, "whatever was in them before is nobody's"
    assert (disk.page_count, len(disk.staged), disk.counts.not_stored) == (4, 0, 4)
    assert worker.granted(3, PROMPT).cached_tokens == 0


def test_what_was_invalidated_before_it_could_not_be_copied_is_gone_once(
    rig: DeviceRig, worker: Worker
) -> None:
    cache(worker, 1, PROMPT)
    flood(worker)
    rig.ask(InvalidateCache(what="root", name=ROOT.hex()))
    disk = rig.core.books.disk
    assert disk is not None and disk.page_count == 0 and len(disk.staged) == 4
    assert len(not_taken(rig)) == 4
    assert not disk.staged
