"""A disk that does not answer, or not everywhere, holds up nobody and costs what lies there."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs
from tests.unit.gateway.support import eventually
from tests.unit.pager.actor_rig import HOST, POOL_BYTES, SPEC, Answers, made_actor
from tests.unit.pager.test_disk import disk_on, pool
from tests.unit.pager.test_disk_file import POOL, load_of, opened, place, store_of
from tests.unit.pager.test_retired_notes import ONE, notes

from pagemesh.kernels.native.pool_file import PoolClosedToUs
from pagemesh.pager.storage import disk, disk_file, kept_file, retired_notes
from pagemesh.pager.storage.disk_file import DiskPlace
from pagemesh.pager.storage.plain_file import PlainFile
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.pager.tiers.tier_events import (
    DiskFailed,
    DiskFound,
    PagesLoaded,
    PagesWritten,
    RememberRetired,
)

__all__ = ["place", "pool"]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Closed: what ``Slow`` files are asked for does not come back."""
    monkeypatch.setattr(disk, "CLOSE_S_MAX", 0.2)
    monkeypatch.setattr(retired_notes, "KEEP_S_MAX", 0.2)
    event = threading.Event()
    event.set()
    yield event
    event.set()


def slow(gate: threading.Event) -> Callable[[Path], PlainFile]:
    class Slow(PlainFile):
        def write(self, data: bytes | memoryview, offset: int) -> None:
            gate.wait(20.0)
            super().write(data, offset)

        def read_into(self, target: memoryview, offset: int) -> int:
            gate.wait(20.0)
            return super().read_into(target, offset)

    return Slow


@pytest.mark.parametrize("is_reading", [False, True])
async def test_a_pager_that_ends_waits_seconds_for_it_and_knows_what_it_may_still_do(
    tmp_path: Path, pool: np.ndarray, gate: threading.Event, is_reading: bool
) -> None:
    async with disk_on(tmp_path, pool, slow(gate)) as (made, heard):
        assert isinstance(await heard.next(), DiskFound)
        await made.take(store_of((4, 5)))
        assert await heard.next() == PagesWritten((4, 5))
        gate.clear()
        if is_reading:
            made.load(load_of((4, 5)))
        else:
            await made.take(store_of((6, 7)))
        began_s = time.monotonic()
        with capture_logs() as logs:
            assert await made.close() is not is_reading, "nobody else may have that pool"
        assert time.monotonic() - began_s < 5.0
        left = [one for one in threading.enumerate() if one.name.startswith("pager-disk")]
        assert left and all(one.daemon for one in left), "the process would not end"
        told = [one["event"] for one in logs]
        assert told == ([] if is_reading else ["pager.disk_does_not_answer"])
        gate.set()
        await asyncio.sleep(0.05)


async def test_a_pager_that_ends_while_its_disk_is_being_listed_finds_no_fault_with_it(
    tmp_path: Path, pool: np.ndarray, gate: threading.Event
) -> None:
    async with disk_on(tmp_path, pool) as (made, heard):
        assert isinstance(await heard.next(), DiskFound)
    gate.clear()
    async with disk_on(tmp_path, pool, slow(gate)) as (made, heard):
        with capture_logs() as logs:
            assert await made.close(), "it reads nothing into the pool"
        assert [(one["event"], one["log_level"]) for one in logs] == [
            ("pager.disk_not_listed", "info")
        ]
        gate.set()


@pytest.mark.parametrize("how", ["loaded", "failed", "crashed"])
async def test_what_it_says_after_it_was_closed_nobody_hears(
    tmp_path: Path, pool: np.ndarray, gate: threading.Event, how: str
) -> None:
    """There may be another pool by then."""
    is_done = threading.Event()

    class Late(slow(gate)):  # type: ignore[misc]
        def read_into(self, target: memoryview, offset: int) -> int:
            was_open = gate.is_set()
            try:
                read: int = super().read_into(target, offset)
                if how != "loaded" and not was_open:
                    raise OSError(errno.ENODEV, "gone") if how == "failed" else RuntimeError
                return read
            finally:
                if not was_open:
                    is_done.set()

    async with disk_on(tmp_path, pool, Late) as (made, heard):
        assert isinstance(await heard.next(), DiskFound)
        await made.take(store_of((4, 5)))
        assert await heard.next() == PagesWritten((4, 5))
        gate.clear()
        made.load(load_of((4, 5)))
        assert not await made.close()
        gate.set()
        await asyncio.to_thread(is_done.wait, 10.0)
        await asyncio.sleep(0.1)
        assert heard.is_empty


async def test_a_pool_that_is_being_read_into_is_given_up(tmp_path: Path) -> None:
    class Hung:
        async def close(self) -> bool:
            return False

    actor = made_actor(tmp_path, Answers())
    store = PoolStore.create(tmp_path, HOST, SPEC, POOL_BYTES)
    await actor._start(store, adopted=False)
    assert actor._life is not None
    actor._life.disk = Hung()  # type: ignore[assignment]
    await actor.end()
    assert not PoolStore.path_of(tmp_path, HOST).exists()


async def test_files_whose_closing_fails_end_a_life_like_any_other(
    tmp_path: Path, pool: np.ndarray
) -> None:
    class Full(PlainFile):
        def close(self) -> None:
            super().close()
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with capture_logs() as logs:
        async with disk_on(tmp_path, pool, Full) as (made, heard):
            assert isinstance(await heard.next(), DiskFound)
            assert await made.close()
    assert "pager.disk_not_closed" in [one["event"] for one in logs]


async def test_a_record_that_cannot_be_read_is_one_pages_damage(
    tmp_path: Path, pool: np.ndarray
) -> None:
    bad: set[str] = set()

    class Bad(PlainFile):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.name = path.name

        def read_into(self, target: memoryview, offset: int) -> int:
            if self.name in bad and offset:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read_into(target, offset)

    async with disk_on(tmp_path, pool, Bad) as (made, heard):
        assert isinstance(await heard.next(), DiskFound)
        await made.take(store_of((4, 5)))
        assert await heard.next() == PagesWritten((4, 5))
        bad.add("host.disk.index")
        made.load(load_of((4, 5)))
        done = await heard.next()
        assert isinstance(done, PagesLoaded) and (done.page_count, done.bad_slot) == (0, 4)
    async with disk_on(tmp_path, pool, Bad) as (made, heard):
        found = await heard.next()
        assert isinstance(found, DiskFound) and found.tier.page_count == 0
        bad.clear()
        await made.take(store_of((4, 5)))
        assert await heard.next() == PagesWritten((4, 5))
        assert heard.is_empty


def test_what_cannot_be_read_at_the_start_is_emptied_before_it_is_used(place: DiskPlace) -> None:
    file, _ = opened(place)
    file.store(store_of((2, 0)), POOL[:2])
    file.close()
    real = PlainFile.read_into

    def read_into(own: PlainFile, target: memoryview, offset: int) -> int:
        if offset == disk_file._HEAD_BYTES:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(own, target, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainFile, "read_into", read_into)
        file, found = opened(place)
    assert not len(found.records.slots) and found.dropped_count == found.slot_count
    for slot in (0, 2):
        file.empty(slot)
    file.close()
    assert not len(opened(place)[1].records.slots)


async def test_a_tier_that_there_is_no_memory_for_is_off(
    tmp_path: Path, pool: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(disk, "DiskTier", no_memory)
    async with disk_on(tmp_path, pool) as (_, heard):
        failed = await heard.next()
    assert isinstance(failed, DiskFailed) and "PAGEMESH_DISK_BYTES" in failed.why


async def test_a_note_that_takes_long_is_owed_until_it_is_there(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, replace = notes(tmp_path), kept_file.KeptFile.replace

    def hanging(own: kept_file.KeptFile[object], value: object) -> str:
        gate.wait(20.0)
        return replace(own, value)

    monkeypatch.setattr(kept_file.KeptFile, "replace", hanging)
    gate.clear()
    began_s = time.monotonic()
    await some.keep(RememberRetired(1, ONE))
    await some.mend()
    assert time.monotonic() - began_s < 5.0
    assert some.unkept is not None and "does not answer" in some.unkept.message
    gate.set()
    await eventually(lambda: some.unkept is None)
    assert notes(tmp_path).read() == ONE


async def test_at_the_end_a_note_has_seconds_and_then_keeps_nobody(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, replace = notes(tmp_path), kept_file.KeptFile.replace
    monkeypatch.setattr(retired_notes, "CLOSE_S_MAX", 0.5)

    def hanging(own: kept_file.KeptFile[object], value: object) -> str:
        gate.wait(20.0)
        return replace(own, value)

    monkeypatch.setattr(kept_file.KeptFile, "replace", hanging)
    gate.clear()
    await some.keep(RememberRetired(1, ONE))
    began_s = time.monotonic()
    await some.close()
    assert 0.4 < time.monotonic() - began_s < 5.0
    left = [one for one in threading.enumerate() if one.name == "pager-notes"]
    assert left and all(one.daemon for one in left), "the process would not end"
    gate.set()
    await eventually(lambda: some.unkept is None)


async def test_a_pool_that_cannot_be_opened_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made_actor(tmp_path, Answers())
    first._holders.write()
    PoolStore.create(tmp_path, HOST, SPEC, POOL_BYTES).close()

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(PoolClosedToUs):
            await made_actor(tmp_path, Answers()).begin()
    assert PoolStore.path_of(tmp_path, HOST).exists()
    second = made_actor(tmp_path, Answers())
    await second.begin()
    assert second._life is not None
    await second.end()
