"""The disk tier's threads: bytes are taken at once, everything is answered, the first fault ends
it."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.unit.pager.test_disk_file import FACTS, PAGE_BYTES, PAGE_COUNT, load_of, store_of

from pagemesh.pager.limits import PagerLimits, PoolFacts
from pagemesh.pager.pages.runs import Pages, Run
from pagemesh.pager.storage.disk import Disk
from pagemesh.pager.storage.disk_file import DiskPlace
from pagemesh.pager.storage.page_bytes import MappedPages, PageBytes
from pagemesh.pager.storage.plain_file import Opener, PlainFile
from pagemesh.pager.storage.retired_notes import RetiredNotes
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.tier_events import (
    DiskContents,
    DiskFailed,
    DiskFound,
    ForgetSlots,
    LoadPages,
    PagesLoaded,
    PagesWritten,
    SkipSlots,
    TierEvent,
)
from pagemesh.wire.errors import Busy


class Heard:
    """What the disk has to say, in order."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[TierEvent | BaseException] = asyncio.Queue()

    def __call__(self, event: TierEvent | BaseException) -> None:
        self._events.put_nowait(event)

    async def next(self) -> TierEvent | BaseException:
        async with asyncio.timeout(10):
            return await self._events.get()

    @property
    def is_empty(self) -> bool:
        return self._events.empty()


@asynccontextmanager
async def disk_on(
    folder: Path,
    pool: np.ndarray | PageBytes,
    opener: Opener = PlainFile,
    *,
    memory_bytes: int = 0,
) -> AsyncIterator[tuple[Disk, Heard]]:
    heard = Heard()
    bytes_max = 10 * (PAGE_BYTES + 128)
    place = DiskPlace(folder, "host", bytes_max, b"secret" * 8, memory_bytes=memory_bytes)
    retired = RetiredNotes.beside(folder, "host", place)
    pages = MappedPages(FACTS, pool) if isinstance(pool, np.ndarray) else pool
    disk = Disk(place, FACTS, PagerLimits(), pages, heard, opener, retired=retired)
    disk.open()
    try:
        yield disk, heard
    finally:
        await disk.close()


@pytest.fixture
def pool() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, PAGE_COUNT * PAGE_BYTES).astype(np.uint8)


async def test_bytes_are_taken_before_take_returns_and_read_back_as_they_were(
    tmp_path: Path, pool: np.ndarray
) -> None:
    before = pool.copy()
    async with disk_on(tmp_path, pool) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        await disk.take(store_of((4, 5)))
        pool[:] = 0
        assert await heard.next() == PagesWritten((4, 5))
        disk.load(load_of((4, 5)))
        done = await heard.next()
        assert isinstance(done, PagesLoaded)
        assert (done.load, done.page_count, done.bad_slot) == (1, 2, None)
    assert np.array_equal(pool[5 * PAGE_BYTES : 7 * PAGE_BYTES], before[: 2 * PAGE_BYTES])


async def test_what_was_taken_is_on_disk_when_the_pager_has_stopped(
    tmp_path: Path, pool: np.ndarray
) -> None:
    async with disk_on(tmp_path, pool) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        await disk.take(store_of((4, 5, 6)))
    async with disk_on(tmp_path, pool) as (_, heard):
        found = await heard.next()
    assert isinstance(found, DiskFound) and found.tier.page_count == 3


async def test_what_earlier_pagers_stored_is_taken_over_beside_the_event_loop(
    tmp_path: Path, pool: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a million records it takes seconds, and who is not heard for ten is killed."""
    threads = list[str]()

    class Watched(DiskTier):
        def __init__(self, facts: PoolFacts, found: DiskContents, staged_pages_max: int) -> None:
            threads.append(threading.current_thread().name)
            super().__init__(facts, found, staged_pages_max)

    monkeypatch.setattr("pagemesh.pager.storage.disk.DiskTier", Watched)
    async with disk_on(tmp_path, pool) as (_, heard):
        found = await heard.next()
    assert isinstance(found, DiskFound) and isinstance(found.tier, Watched)
    assert found.tier.staged_pages_max == PagerLimits().staged_pages_max(FACTS)
    assert [name.partition("_")[0] for name in threads] == ["pager-disk-write"]


async def test_what_is_forgotten_is_so_before_its_slot_is_written_anew(
    tmp_path: Path, pool: np.ndarray
) -> None:
    async with disk_on(tmp_path, pool) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        await disk.take(store_of((4, 5, 6)))
        assert await heard.next() == PagesWritten((4, 5, 6))
        await disk.perform(ForgetSlots((4, 5)))
        await disk.take(store_of((4,)))
        assert await heard.next() == PagesWritten((4,))
        assert slots_with_records(tmp_path) == [4, 6], "as if the process died now"


def slots_with_records(folder: Path) -> list[int]:
    index = (folder / "host.disk.index").read_bytes()[4_096:]
    return [at // 128 for at in range(0, len(index), 128) if any(index[at : at + 128])]


class FullFile(PlainFile):
    """A disk that is full when the first page is written."""

    def write(self, data: bytes | memoryview, offset: int) -> None:
        if len(data) == PAGE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(data, offset)


async def test_a_full_disk_is_told_of_once_and_reads_are_answered_still(
    tmp_path: Path, pool: np.ndarray
) -> None:
    async with disk_on(tmp_path, pool, FullFile) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        await disk.take(store_of((4,)))
        assert await heard.next() == DiskFailed(f"{tmp_path}: no space left on device")
        await disk.take(store_of((5,)))
        disk.load(load_of((4,)))
        answer = await heard.next()
        assert isinstance(answer, PagesLoaded) and (answer.page_count, answer.bad_slot) == (0, None)
        assert heard.is_empty


def read_only(path: Path) -> PlainFile:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


async def test_a_disk_that_cannot_be_opened_is_told_of(tmp_path: Path, pool: np.ndarray) -> None:
    async with disk_on(tmp_path, pool, read_only) as (disk, heard):
        failed = await heard.next()
        await disk.take(store_of((4,)))
        disk.load(load_of((4,)))
        assert isinstance(await heard.next(), PagesLoaded)
    assert failed == DiskFailed(f"{tmp_path / 'host.disk.index'}: read-only file system")


async def test_a_bug_on_a_thread_is_not_lost(tmp_path: Path, pool: np.ndarray) -> None:
    async with disk_on(tmp_path, pool) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        await disk.take(store_of((400,)))  # there is no such slot
        assert isinstance(await heard.next(), IndexError)


async def test_a_sector_that_cannot_be_read_is_a_damaged_page_and_no_end_of_the_tier(
    tmp_path: Path, pool: np.ndarray
) -> None:
    before = pool.copy()
    async with disk_on(tmp_path, pool, UnreadableFile) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        await disk.take(store_of((4, 5, 6)))
        assert await heard.next() == PagesWritten((4, 5, 6))
        for slots, count, bad_slot in (((4, 5, 6), 1, 5), ((4,), 1, None)):
            disk.load(load_of(slots))
            done = await heard.next()
            assert isinstance(done, PagesLoaded)
            assert (done.page_count, done.bad_slot) == (count, bad_slot)
        assert heard.is_empty
    assert np.array_equal(pool[5 * PAGE_BYTES : 6 * PAGE_BYTES], before[:PAGE_BYTES])


class UnreadableFile(PlainFile):
    """The page in slot 5 is on a bad sector."""

    def read_into(self, target: memoryview, offset: int) -> int:
        if len(target) == PAGE_BYTES and offset == 5 * PAGE_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_into(target, offset)


async def test_memory_that_the_machine_has_not_is_told_of_and_the_files_are_let_go(
    tmp_path: Path, pool: np.ndarray
) -> None:
    for _ in range(2):
        async with disk_on(tmp_path, pool, memory_bytes=1 << 60) as (_, heard):
            failed = await heard.next()
        assert failed == DiskFailed(
            f"{tmp_path}: there is no memory for PAGEMESH_HOST_BYTES={1 << 60} (--host-bytes); "
            "give less"
        )
    async with disk_on(tmp_path, pool) as (_, heard):
        assert isinstance(await heard.next(), DiskFound)


class SlowFile(PlainFile):
    """Writes nothing until it is let to."""

    may_write = threading.Event()

    def write(self, data: bytes | memoryview, offset: int) -> None:
        assert SlowFile.may_write.wait(10)
        super().write(data, offset)


async def test_nobody_waits_for_a_slow_disk(tmp_path: Path, pool: np.ndarray) -> None:
    async with disk_on(tmp_path, pool):
        pass  # the files are there, and need no writing to be opened
    SlowFile.may_write.clear()
    async with disk_on(tmp_path, pool, SlowFile) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        async with asyncio.timeout(5):
            for slot in range(8):
                await disk.take(store_of((slot,)))
            await disk.perform(SkipSlots((3,)))
            await disk.perform(ForgetSlots((8,)))
            disk.load(load_of((9,)))
            answer = await heard.next()
        assert isinstance(answer, PagesLoaded) and answer.bad_slot == 9
        SlowFile.may_write.set()
        assert [await heard.next() for _ in range(8)] == [PagesWritten((at,)) for at in range(8)]
    assert slots_with_records(tmp_path) == [0, 1, 2, 4, 5, 6, 7]


async def test_what_is_skipped_while_it_is_written_is_not_found_and_its_slot_is_used_again(
    tmp_path: Path, pool: np.ndarray
) -> None:
    SlowFile.may_write.set()
    async with disk_on(tmp_path, pool, SlowFile) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        SlowFile.may_write.clear()
        await disk.take(store_of((4, 5)))
        await disk.perform(SkipSlots((4,)))
        SlowFile.may_write.set()
        assert await heard.next() == PagesWritten((4, 5))
        await disk.perform(SkipSlots((5,)))  # written, and nobody has heard of it yet
    async with disk_on(tmp_path, pool) as (disk, heard):
        found = await heard.next()
        assert isinstance(found, DiskFound) and not found.tier.page_count
        await disk.take(store_of((4,)))
        assert await heard.next() == PagesWritten((4,))
        await disk.perform(SkipSlots((4,)))
        await disk.perform(ForgetSlots((4,)))
        await disk.take(store_of((4,)))
        assert await heard.next() == PagesWritten((4,))
        disk.load(load_of((4,)))
        done = await heard.next()
    assert isinstance(done, PagesLoaded) and done.page_count == 1


class StuckFilling:
    """Of a worker that fills nothing, or nothing until ``gate`` is open."""

    def __init__(self, gate: threading.Event | None) -> None:
        self._gate = gate
        self.settled = 0
        self.began = threading.Event()
        self.is_closed = False

    def row(self, at: int) -> memoryview:
        return memoryview(bytearray(PAGE_BYTES))

    def settle(self, count: int) -> None:
        self.began.set()
        if self._gate is None:
            raise Busy("the worker does not answer")
        assert self._gate.wait(10)
        self.settled = count

    def close(self) -> None:
        self.is_closed = True


class StuckPages(MappedPages):
    """Each of its fillings waits for a gate of its own, by mover, or fails without one."""

    gates: dict[int, threading.Event]

    def filling(self, pages: Pages, mover: int = 0) -> StuckFilling:
        self.last = StuckFilling(self.gates.get(mover))
        return self.last


@pytest.fixture
def stuck(pool: np.ndarray) -> StuckPages:
    made = StuckPages(FACTS, pool)
    made.gates = {7: threading.Event(), 8: threading.Event()}
    return made


def filled_by(mover: int, number: int) -> LoadPages:
    command = load_of((4, 5))
    return msgspec.structs.replace(command, load=number, mover=mover)


@asynccontextmanager
async def stored_on(folder: Path, stuck: StuckPages) -> AsyncIterator[tuple[Disk, Heard]]:
    """A disk with two pages to fill others with."""
    async with disk_on(folder, stuck) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        await disk.take(store_of((4, 5)))
        assert await heard.next() == PagesWritten((4, 5))
        yield disk, heard


async def test_what_a_worker_did_not_fill_is_not_said_to_be_there(
    tmp_path: Path, stuck: StuckPages
) -> None:
    async with stored_on(tmp_path, stuck) as (disk, heard):
        disk.load(filled_by(9, 1))
        done = await heard.next()
        assert isinstance(done, PagesLoaded) and (done.page_count, done.bad_slot) == (0, None)
        assert stuck.last.is_closed


async def test_a_worker_that_stands_still_holds_up_its_own_loads_alone(
    tmp_path: Path, stuck: StuckPages
) -> None:
    async with stored_on(tmp_path, stuck) as (disk, heard):
        disk.load(filled_by(7, 1))
        disk.load(filled_by(8, 2))
        stuck.gates[8].set()
        done = await heard.next()
        assert isinstance(done, PagesLoaded) and (done.load, done.page_count) == (2, 2)
        stuck.gates[7].set()
        done = await heard.next()
        assert isinstance(done, PagesLoaded) and (done.load, done.page_count) == (1, 2)


async def test_handing_pages_over_counts_for_those_from_memory_and_from_disk_alike(
    tmp_path: Path, stuck: StuckPages
) -> None:
    async with disk_on(tmp_path, stuck, memory_bytes=2 * PAGE_BYTES) as (disk, heard):
        found = await heard.next()
        assert isinstance(found, DiskFound)
        recent = found.tier.cost.recent
        recent.used((4, 5, 6))
        assert [slot in recent for slot in (4, 5, 6)] == [False, True, True], "two fit"
        await disk.take(store_of((4, 5, 6)))
        assert await heard.next() == PagesWritten((4, 5, 6))
        stuck.gates[8].set()
        disk.load(msgspec.structs.replace(filled_by(8, 1), slots=(4,), pages=Run(5, 6)))
        assert isinstance(await heard.next(), PagesLoaded)  # it is in memory now, and 5 is not
        disk.load(filled_by(7, 2))
        assert await asyncio.to_thread(stuck.last.began.wait, 10)
        await asyncio.to_thread(time.sleep, 0.2)  # a loop's timer may end a little early
        stuck.gates[7].set()
        done = await heard.next()
        assert isinstance(done, PagesLoaded) and (done.page_count, done.memory_count) == (2, 1)
        assert done.read_us > 200_000 and done.memory_us == pytest.approx(done.read_us / 2, rel=0.2)


async def test_whoever_waits_for_a_worker_is_told_to_stop_before_the_disk_is_closed(
    tmp_path: Path, stuck: StuckPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stored_on(tmp_path, stuck) as (disk, _):
        monkeypatch.setattr(stuck, "stop", stuck.gates[7].set)
        disk.load(filled_by(7, 1))
        assert await asyncio.to_thread(stuck.last.began.wait, 10)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 5.0
