"""The disk tier's threads: bytes are taken at once, everything is answered, the first fault ends
it."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.unit.pager.test_disk_file import FACTS, PAGE_BYTES, PAGE_COUNT, load_of, store_of

from pagemesh.pager.disk import Disk
from pagemesh.pager.disk_file import DiskPlace, Opener, PlainFile
from pagemesh.pager.page_bytes import MappedPages
from pagemesh.pager.retired_notes import RetiredNotes
from pagemesh.pager.tier_events import (
    DiskFailed,
    DiskFound,
    ForgetSlots,
    PagesLoaded,
    PagesWritten,
    SkipSlots,
    TierEvent,
)


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
    folder: Path, pool: np.ndarray, opener: Opener = PlainFile
) -> AsyncIterator[tuple[Disk, Heard]]:
    heard = Heard()
    place = DiskPlace(folder, "host", 10 * (PAGE_BYTES + 128), b"secret" * 8)
    retired = RetiredNotes.beside(folder, "host", place)
    disk = Disk(place, FACTS, MappedPages(FACTS, pool), heard, opener, retired=retired)
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
    assert isinstance(found, DiskFound) and found.records.slots.tolist() == [4, 5, 6]


async def test_what_is_forgotten_is_so_at_once(tmp_path: Path, pool: np.ndarray) -> None:
    async with disk_on(tmp_path, pool) as (disk, heard):
        assert isinstance(await heard.next(), DiskFound)
        await disk.take(store_of((4, 5, 6)))
        assert await heard.next() == PagesWritten((4, 5, 6))
        await disk.perform(ForgetSlots((5,)))
        index = (tmp_path / "host.disk.index").read_bytes()  # as if the process died now
    assert not any(index[4_096 + 5 * 128 : 4_096 + 6 * 128])
    assert any(index[4_096 + 4 * 128 : 4_096 + 5 * 128])


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
            disk.load(load_of((9,)))
            answer = await heard.next()
        assert isinstance(answer, PagesLoaded) and answer.bad_slot == 9
        SlowFile.may_write.set()
        assert await heard.next() == PagesWritten((0,))


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
        assert isinstance(found, DiskFound) and not len(found.records.slots)
        await disk.take(store_of((4,)))
        assert await heard.next() == PagesWritten((4,))
        await disk.perform(SkipSlots((4,)))
        await disk.perform(ForgetSlots((4,)))
        await disk.take(store_of((4,)))
        assert await heard.next() == PagesWritten((4,))
        disk.load(load_of((4,)))
        done = await heard.next()
    assert isinstance(done, PagesLoaded) and done.page_count == 1
