"""Pages on a device and the disk tier, with a real pager: workers copy, and some stand still.

Memory of the host without a name stands for that of a GPU; the workers are in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.integration.test_disk_tier import (
    FULL_PAGES,
    PROMPT,
    Reader,
    disk_folder,
    disk_pages,
    pager,
    reported,
    told,
)
from tests.integration.test_pager_service import (
    PAGE_BYTES,
    PAGE_COUNT,
    PAGE_SIZE,
    ROOT,
    SPEC,
    Pager,
    pool_folder,
)
from tests.unit.pager.rig import key_of, order_of

from pagemesh.engine.cuda.device import INTERPRETER, SharedMaker
from pagemesh.engine.memory_box import MemoryBox
from pagemesh.wire.errors import NoCapacity
from pagemesh.wire.messages import Message, Ok
from pagemesh.wire.pager_messages import (
    Admit,
    Declare,
    Declared,
    PoolSpec,
    Queued,
    SessionOpened,
)
from pagemesh.wire.pool_memory import Leave
from pagemesh.wire.tokens import pack

__all__ = ["disk_folder", "pager", "pool_folder"]
DEVICE_SPEC = msgspec.structs.replace(SPEC, place=INTERPRETER)
WHOLE_POOL_TOKENS = PAGE_COUNT * PAGE_SIZE


class Gated(SharedMaker):
    """Copies stand still in their middle while ``gate`` is shut."""

    def __init__(self) -> None:
        self.gate, self.is_copying = threading.Event(), threading.Event()
        self.gate.set()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self.is_copying.set()
        assert self.gate.wait(30)
        yield


class DeviceReader(Reader):
    """A worker whose pool is on a device."""

    def __init__(self, pager: Pager, name: str, incarnation: int) -> None:
        super().__init__(pager, name, incarnation)
        self.maker = Gated()
        self.box = MemoryBox(self.maker, pager.folder / f"{name}-{incarnation}.memory")

    async def open(self, spec: PoolSpec = DEVICE_SPEC) -> SessionOpened:
        return await super().open(spec)

    @contextlib.contextmanager
    def rows(self) -> Iterator[np.ndarray]:
        assert self.opened is not None
        memory = self.box.claim(self.opened.pool_incarnation, PAGE_COUNT * PAGE_BYTES)
        yield memory.numpy().reshape(PAGE_COUNT, PAGE_BYTES)

    def asks_for(self, number: int, tokens: list[int], reserve_tokens: int = 0) -> Message:
        assert self.opened is not None
        return Admit(
            key=key_of(number), order=order_of(number), worker=self.name,
            incarnation=self.incarnation, epoch=self.opened.epoch, root=ROOT, tokens=pack(tokens),
            reserve_tokens=max(reserve_tokens, len(tokens)), deadline_ms=20_000,
        )  # fmt: skip

    async def leave(self) -> None:
        await self.pager.ask(Leave(worker=self.name, incarnation=self.incarnation), Ok, 10_000)

    async def declare_nothing(self) -> None:
        assert self.opened is not None
        message = Declare(
            worker=self.name, incarnation=self.incarnation, epoch=self.opened.epoch, number=1,
            part=0, parts=1, leases=[],
        )  # fmt: skip
        await self.pager.ask(message, Declared)

    def close(self) -> None:
        self.maker.gate.set()
        self.box.close()
        self.lock.close()


@pytest.fixture
def in_memory(disk_folder: Path) -> dict[str, str]:
    """Settings of a tier in the host's memory alone."""
    return {"PAGEMESH_DISK_DIR": "", "PAGEMESH_HOST_BYTES": "1MiB"}


@pytest.fixture
def readers(pager: Pager) -> Iterator[list[DeviceReader]]:
    made = [DeviceReader(pager, name, 11 + at) for at, name in enumerate(("prefill", "decode"))]
    yield made
    for reader in made:
        reader.close()


async def computed_and_stored(reader: DeviceReader) -> np.ndarray:
    await reader.open()
    await disk_pages(reader.pager, 0)
    content = await reader.compute(1, PROMPT)
    await reader.flood(900)
    await disk_pages(reader.pager, FULL_PAGES)
    return content


async def restarted_without_its_pool(pager: Pager) -> None:
    """As after a reboot: the process and its pool are gone."""
    await pager.end(signal.SIGTERM)
    for path in pager.folder.glob("*.pool"):
        path.unlink()
    await pager.start()


async def reads_back(reader: DeviceReader, content: np.ndarray) -> None:
    granted = await reader.admit_soon(2, PROMPT)
    assert granted.cached_tokens == granted.waterfall.fetched_tokens == FULL_PAGES * PAGE_SIZE
    assert np.array_equal(reader.bytes_of(granted), content)
    await reader.release(granted, PROMPT)


async def test_what_was_evicted_is_read_back_as_it_was(readers: list[DeviceReader]) -> None:
    content = await computed_and_stored(readers[0])
    await readers[1].open()
    with readers[1].rows() as rows:
        assert rows.any()
        rows[:] = 0  # whatever comes is from the disk
    await reads_back(readers[1], content)


async def test_what_is_cached_when_a_pager_stops_is_there_for_the_next_though_its_pool_is_gone(
    readers: list[DeviceReader],
) -> None:
    worker = readers[0]
    await worker.open()
    await disk_pages(worker.pager, 0)
    content = await worker.compute(1, PROMPT)
    await restarted_without_its_pool(worker.pager)
    await worker.open()
    await disk_pages(worker.pager, FULL_PAGES)
    await reads_back(worker, content)


async def test_what_was_evicted_to_the_hosts_memory_is_there_when_pager_and_device_are_not(
    pager: Pager, in_memory: dict[str, str], readers: list[DeviceReader]
) -> None:
    await pager.end()
    pager.environ |= in_memory
    await pager.start()
    content = await computed_and_stored(readers[0])
    await reads_back(readers[0], content)
    assert (pager.folder / "testhost.host.pages").exists()
    readers[0].close()
    await pager.end(signal.SIGKILL)
    await pager.start()
    await readers[1].open()  # the memory of the device is gone
    await disk_pages(pager, FULL_PAGES)
    await reads_back(readers[1], content)


async def test_memory_beside_the_disk_saves_reading_it(
    pager: Pager, readers: list[DeviceReader], disk_folder: Path
) -> None:
    await pager.end()
    pager.environ["PAGEMESH_HOST_BYTES"] = "1MiB"
    await pager.start()
    content = await computed_and_stored(readers[0])
    pages = disk_folder / "testhost.disk.pages"
    pages.write_bytes(bytes(pages.stat().st_size))
    await reads_back(readers[0], content)
    assert (await told(pager, "stats", {}))["disk"]["from_memory"] == FULL_PAGES


async def test_memory_for_pages_that_are_in_memory_is_refused(
    pager: Pager, in_memory: dict[str, str]
) -> None:
    await pager.end()
    pager.environ |= in_memory
    await pager.start()
    worker = Reader(pager, "prefill", 31)
    with pytest.raises(NoCapacity, match="already; leave it out"):
        await worker.open()
    worker.lock.close()


async def test_the_last_worker_that_leaves_moves_what_is_cached_before_it_goes(
    readers: list[DeviceReader],
) -> None:
    first, last = readers
    pager = first.pager
    await first.open()
    await last.open()
    await disk_pages(pager, 0)
    content = await first.compute(1, PROMPT)
    await first.leave()
    await disk_pages(pager, 0)  # the other one may do it yet
    await last.leave()
    await disk_pages(pager, FULL_PAGES)
    await first.open()  # it stays after all, and something new comes
    await first.compute(3, [*range(900, 900 + len(PROMPT))])
    await first.leave()
    await disk_pages(pager, 2 * FULL_PAGES)
    for worker in readers:
        worker.close()
    await restarted_without_its_pool(pager)
    later = DeviceReader(pager, "prefill", 21)
    await later.open()
    await disk_pages(pager, 2 * FULL_PAGES)
    await reads_back(later, content)
    later.close()


async def test_a_worker_that_leaves_is_waited_for(readers: list[DeviceReader]) -> None:
    worker = readers[0]
    await worker.open()
    await disk_pages(worker.pager, 0)
    await worker.compute(1, PROMPT)
    worker.maker.gate.clear()
    threading.Timer(0.8, worker.maker.gate.set).start()
    await worker.leave()
    await disk_pages(worker.pager, FULL_PAGES)


async def test_a_pager_ends_though_a_worker_stands_still(readers: list[DeviceReader]) -> None:
    worker = readers[0]
    await computed_and_stored(worker)
    worker.maker.gate.clear()
    worker.maker.is_copying.clear()
    await worker.pager.ask(worker.asks_for(2, PROMPT), Queued)
    assert worker.maker.is_copying.wait(10)
    async with asyncio.timeout(15):
        assert await worker.pager.end() == 0


async def test_an_eviction_does_not_wait_long_for_a_worker_that_stands_still(
    readers: list[DeviceReader],
) -> None:
    worker, other = readers
    content = await computed_and_stored(worker)
    await other.open()
    worker.maker.gate.clear()
    more = [*range(900, 900 + len(PROMPT))]
    await other.compute(3, more)
    began_s = time.monotonic()
    await other.flood(901)
    assert time.monotonic() - began_s < 3.0
    await disk_pages(other.pager, 2 * FULL_PAGES)  # the other one has copied them
    other.maker.gate.clear()
    await other.compute(4, [*range(700, 700 + len(PROMPT))])
    await other.flood(902)
    report = await other.pager.report()
    assert report.disk_slots and report.disk_pages == 2 * FULL_PAGES, "those are lost, no more"
    other.maker.gate.set()
    await reads_back(other, content)


@pytest.mark.parametrize("rounds", [0, 8])
async def test_pages_that_a_worker_may_be_filling_are_nobody_elses_over_a_pager_that_dies(
    readers: list[DeviceReader], rounds: int
) -> None:
    """Also when its session was over by then."""
    slow, other = readers
    pager = slow.pager
    await computed_and_stored(slow)
    await other.open()  # from whom the next pager has the memory
    slow.maker.gate.clear()
    slow.maker.is_copying.clear()
    await pager.ask(slow.asks_for(2, PROMPT), Queued)
    assert slow.maker.is_copying.wait(10)
    for _ in range(rounds):
        await asyncio.sleep(0.5)
        await other.open()
    await pager.end(signal.SIGKILL)
    await pager.start()
    await other.open()
    await other.declare_nothing()
    wanted = other.asks_for(3, [7], WHOLE_POOL_TOKENS)
    await pager.ask(wanted, Queued)
    assert (await pager.report()).draining_pages == FULL_PAGES
    slow.maker.gate.set()
    await slow.open()
    await slow.declare_nothing()
    await reported(pager, lambda report: report.held_pages == PAGE_COUNT)
