"""Pages on a device go to the pager and back by a worker's hand, whatever becomes of that.

Memory of the host without a name stands for that of a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pagemesh.engine.cuda.device import INTERPRETER, SharedMaker
from pagemesh.engine.memory_box import MemoryBox
from pagemesh.kernels.native.locks import HolderLock
from pagemesh.pager.events import Holder
from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.pages.runs import Run
from pagemesh.pager.storage import device_pages
from pagemesh.pager.storage.device_pages import DevicePages
from pagemesh.pager.storage.holders import Holders
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.runtime.descriptors import Packet, exchange
from pagemesh.wire import codec
from pagemesh.wire.errors import Busy, Gone
from pagemesh.wire.messages import Message, Ok, Refused
from pagemesh.wire.pool_format import LOCK_SUFFIX, MEMORY_SUFFIX
from pagemesh.wire.pool_memory import MovePages
from pagemesh.wire.tokens import pack_extents

PAGE_COUNT, PAGE_BYTES = 700, 64
FACTS = PoolFacts(
    host="here", epoch=1, incarnation=77, page_count=PAGE_COUNT, page_size=16,
    page_bytes=PAGE_BYTES, layout_digest=b"d" * 32, path="/pool", place=INTERPRETER,
)  # fmt: skip
SCATTERED = np.arange(1, PAGE_COUNT, 2, dtype=np.uint32)
"""More than one message takes, no two side by side."""
STUCK_WORKER = """
import contextlib, pathlib, sys, time
from pagemesh.engine.cuda.device import SharedMaker
from pagemesh.engine.memory_box import MemoryBox
from pagemesh.kernels.native.locks import HolderLock

class Stuck(SharedMaker):
    @contextlib.contextmanager
    def copying(self):
        print("copying", flush=True)
        time.sleep(60)
        yield

folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
lock = HolderLock(folder / f"{name}.lock")
box = MemoryBox(Stuck(), folder / f"{name}.memory")
print("listening", flush=True)
time.sleep(60)
"""


class Gated(SharedMaker):
    """Copies stand still in their middle until ``gate`` is open."""

    def __init__(self) -> None:
        self.gate, self.is_copying = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self.is_copying.set()
        assert self.gate.wait(20)
        yield


class Host:
    """A pager's side, and workers in this process, of whom the first has made the pool."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory = PoolMemory(folder)
        self.holders = Holders(folder, "here")
        self.pages = DevicePages(FACTS, self.memory, self.holders)
        self.stack = contextlib.ExitStack()

    def worker(self, name: str, maker: SharedMaker | None = None) -> MemoryBox:
        box = MemoryBox(maker or SharedMaker(), self.folder / f"{name}{MEMORY_SUFFIX}")
        self.stack.enter_context(contextlib.closing(box))
        self.stack.enter_context(HolderLock(self.folder / f"{name}{LOCK_SUFFIX}"))
        self.join(name)
        return box

    def join(self, name: str) -> None:
        known = self.holders.living()
        self.holders.remember(Holder(len(known) + 1, name, name))
        if known:
            self.memory.hand_over(FACTS, name)
        else:
            self.memory.make(FACTS, name)

    def close(self) -> None:
        self.pages.stop()
        self.pages.close()
        self.stack.close()
        self.memory.close()
        self.holders.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


def pool_of(box: MemoryBox) -> torch.Tensor:
    """uint8 [pages, page_bytes], random."""
    pool = box.claim(77, PAGE_COUNT * PAGE_BYTES).view(PAGE_COUNT, PAGE_BYTES)
    pool.copy_(torch.from_numpy(np.random.default_rng(5).integers(0, 256, pool.shape, np.uint8)))
    return pool


def taken(host: Host, table: np.ndarray) -> np.ndarray:
    return asyncio.run(host.pages.take(table))


def test_pages_are_copied_out_wherever_they_lie(host: Host) -> None:
    pool = pool_of(host.worker("first"))
    assert np.array_equal(taken(host, SCATTERED), pool.numpy()[SCATTERED])
    assert np.array_equal(asyncio.run(host.pages.take(Run(3, 9))), pool.numpy()[3:9])


def test_pages_are_filled_in_order_and_only_those_that_are_settled(host: Host) -> None:
    pool = pool_of(host.worker("first"))
    before = pool.numpy().copy()
    filling = host.pages.filling(SCATTERED, 1)
    for at in range(300):
        filling.row(at)[:] = bytes([at % 251]) * PAGE_BYTES
    assert filling.settled == 256, "the staging memory was full once"
    filling.settle(290)
    filled, rest = SCATTERED[:290], np.setdiff1d(np.arange(PAGE_COUNT), SCATTERED[:290])
    assert filling.settled == 290
    assert (pool.numpy()[filled] == (np.arange(290) % 251)[:, None]).all()
    assert np.array_equal(pool.numpy()[rest], before[rest])


def test_one_worker_that_stands_still_is_left_alone_and_what_it_writes_later_is_lost(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_pages, "OUT_S_MAX", 0.1)
    stuck = Gated()
    pool = pool_of(host.worker("first", stuck))
    host.worker("second")
    assert np.array_equal(taken(host, np.arange(4, dtype=np.uint32)), pool.numpy()[:4])
    started = time.monotonic()
    second_taken = taken(host, np.arange(8, 12, dtype=np.uint32))
    assert time.monotonic() - started < 0.1, "it is not asked again at once"
    [staging] = host.pages._idle
    stuck.gate.set()
    host.memory.hand_over(FACTS, "first")  # answered after what came before
    assert np.array_equal(staging.rows[:4], pool.numpy()[8:12]), "it wrote somewhere else"
    assert np.array_equal(second_taken, pool.numpy()[8:12])


def test_nobody_to_copy_pages_out_is_said(host: Host) -> None:
    with pytest.raises(Busy, match="no worker copies"):
        taken(host, np.arange(4, dtype=np.uint32))


def started(work: Callable[[], None]) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_whoever_fills_pages_waits_until_the_worker_is_done(host: Host) -> None:
    slow = Gated()
    pool = pool_of(host.worker("first", slow))
    filling = host.pages.filling(Run(0, 2), 1)
    filling.row(0)[:] = b"x" * PAGE_BYTES
    thread, errors = started(lambda: filling.settle(1))
    assert slow.is_copying.wait(10)
    time.sleep(0.3)
    assert thread.is_alive() and filling.settled == 0
    slow.gate.set()
    thread.join(10)
    assert not errors and filling.settled == 1
    assert bytes(pool[0].tolist()) == b"x" * PAGE_BYTES


def test_the_end_of_a_life_ends_the_wait(host: Host) -> None:
    slow = Gated()
    host.worker("first", slow)
    filling = host.pages.filling(Run(0, 2), 1)
    filling.row(0)
    thread, errors = started(lambda: filling.settle(1))
    assert slow.is_copying.wait(10)
    host.pages.stop()
    thread.join(10)
    assert isinstance(errors[0], Busy) and filling.settled == 0
    slow.gate.set()


def test_pages_of_a_worker_that_dies_are_let_go_when_its_process_has_ended(host: Host) -> None:
    host.worker("first")
    with subprocess.Popen(
        [sys.executable, "-c", STUCK_WORKER, str(host.folder), "second"],
        stdout=subprocess.PIPE, text=True,
    ) as worker:  # fmt: skip
        assert worker.stdout is not None and worker.stdout.readline() == "listening\n"
        host.join("second")
        filling = host.pages.filling(Run(0, 2), 2)
        filling.row(0)
        thread, errors = started(lambda: filling.settle(1))
        assert worker.stdout.readline() == "copying\n"
        time.sleep(0.3)
        assert thread.is_alive(), "it may be writing"
        worker.kill()
        thread.join(10)
        assert isinstance(errors[0], Busy) and filling.settled == 0
        assert host.memory.has_exited("second")


def test_pages_for_a_worker_that_is_gone_are_not_filled(host: Host) -> None:
    host.worker("first")
    filling = host.pages.filling(Run(0, 2), 9)
    filling.row(0)
    with pytest.raises(Gone, match="has ended"):
        filling.settle(1)


def test_without_memory_to_move_pages_through_it_says_so(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.worker("first")

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(Busy, match="Too many open files"):
        taken(host, np.arange(4, dtype=np.uint32))
    with pytest.raises(Busy, match="Too many open files"):
        host.pages.filling(Run(0, 2), 1).row(0)


def test_a_patient_pager_waits_for_a_worker_that_others_would_leave_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_pages, "OUT_S_MAX", 0.05)
    slow = Gated()
    pool = pool_of(host.worker("first", slow))
    with pytest.raises(Busy):
        taken(host, np.arange(4, dtype=np.uint32))
    host.pages.is_patient = True
    threading.Timer(0.3, slow.gate.set).start()
    assert np.array_equal(taken(host, np.arange(4, dtype=np.uint32)), pool.numpy()[:4])


def test_a_worker_is_idle_when_it_has_answered_or_its_process_has_ended(host: Host) -> None:
    """A free lock alone says neither."""
    slow = Gated()
    host.worker("first", slow)
    assert host.memory._is_idle("first")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as worker:
        host.memory.watch("second", worker.pid)
        assert not host.memory._is_idle("second")
        worker.kill()
        worker.wait()
        assert host.memory._is_idle("second")
    assert not host.memory._watched.get("second")


def test_a_pool_that_follows_another_is_moved_and_the_one_before_let_go(host: Host) -> None:
    gc.collect()  # what earlier tests left
    before = len(maps_of_pools())
    old = pool_of(host.worker("first"))
    taken(host, np.arange(4, dtype=np.uint32))
    assert len(maps_of_pools()) == before + 2, "the step's and the mover's"
    facts = replace(FACTS, incarnation=78)
    host.memory.make(facts, "first")
    assert len(maps_of_pools()) == before + 1, "the mover has let go of it"
    pages = DevicePages(facts, host.memory, host.holders)
    assert not asyncio.run(pages.take(Run(0, 4))).any(), "it is another"
    pages.close()
    assert old.any()


def maps_of_pools() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:pagemesh-pool" in line]


@pytest.mark.parametrize(
    ("changes", "with_staging", "named"),
    [
        ({}, False, "memory beside the message"),
        ({"pool_incarnation": 78}, True, "no memory of pool"),
        ({"extents": pack_extents([PAGE_COUNT])}, True, f"page {PAGE_COUNT} of a pool"),
        ({"extents": pack_extents(range(5))}, True, "holds no 5 pages"),
        ({"extents": pack_extents(range(257))}, True, "extents name 257 pages"),
    ],
)
def test_what_a_worker_cannot_move_it_refuses(
    host: Host, changes: dict[str, object], with_staging: bool, named: str
) -> None:
    host.worker("first")
    fields: dict[str, object] = {
        "direction": "out", "pool_incarnation": 77, "size_bytes": PAGE_COUNT * PAGE_BYTES,
        "page_bytes": PAGE_BYTES, "extents": pack_extents([0]),
    }  # fmt: skip
    message: Message = MovePages(**(fields | changes))  # type: ignore[arg-type]
    staging = device_pages._Staging(4, PAGE_BYTES)
    path = host.folder / f"first{MEMORY_SUFFIX}"
    descriptor = staging.descriptor if with_staging else None
    packet, _ = exchange(path, Packet(codec.encode(message), descriptor), 5.0)
    answer = codec.decode(packet.data)
    assert isinstance(answer, Refused) and named in answer.message
    good = codec.encode(MovePages(**fields))  # type: ignore[arg-type]
    packet, _ = exchange(path, Packet(good, staging.descriptor), 5.0)
    assert isinstance(codec.decode(packet.data), Ok), "and goes on"
    staging.close()
