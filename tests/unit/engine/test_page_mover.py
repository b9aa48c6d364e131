"""Memory that pages are copied through is pinned as long as it is mapped, and no longer."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.engine.fake_cuda import FakeCuda

from pagemesh.engine.cuda import device as cuda_device
from pagemesh.engine.cuda import driver
from pagemesh.engine.cuda.device import CudaMaker, SharedMaker
from pagemesh.engine.device_memory import HostMemory, PageMover
from pagemesh.wire.pool_memory import Direction, MovePages
from pagemesh.wire.tokens import pack_extents

PAGE_BYTES = 4096
PAGES = 8
SIZE = PAGES * PAGE_BYTES


class Pinning(SharedMaker):
    """Notes what is pinned, and what was unmapped while it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: dict[int, int] = {}
        self.done = 0
        self.too_early = 0
        close = HostMemory.close

        def noted(memory: HostMemory) -> None:
            self.too_early += memory.bytes.data_ptr() in self.pinned
            close(memory)

        monkeypatch.setattr(HostMemory, "close", noted)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        address = memory.data_ptr()
        self.pinned[address] = memory.numel()
        self.done += 1
        return lambda: self.pinned.__delitem__(address)


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    """The pool's, then those of staging memory."""
    made = [SharedMaker().make(SIZE) for _ in range(6)]
    yield made
    for one in made:
        os.close(one)


def moved(direction: Direction, *pages: int) -> MovePages:
    extents = pack_extents(np.array(pages, np.uint32))
    return MovePages(
        direction=direction, pool_incarnation=1, size_bytes=SIZE, page_bytes=PAGE_BYTES,
        extents=extents,
    )  # fmt: skip


def test_staging_memory_is_pinned_once_and_let_go_before_it_is_unmapped(
    descriptors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, *staging = descriptors
    maker = Pinning(monkeypatch)
    mover = PageMover(maker)
    os.pwrite(pool, b"\7" * PAGE_BYTES, 5 * PAGE_BYTES)
    for _ in range(3):
        mover.move(moved("out", 5), pool, staging[0])
    assert (maker.done, list(maker.pinned.values())) == (1, [SIZE])
    assert os.pread(staging[0], PAGE_BYTES, 0) == b"\7" * PAGE_BYTES
    for one in staging[1:]:
        mover.move(moved("in", 1), pool, one)
    assert maker.done == len(staging) == 5
    assert len(maker.pinned) == 3, "the mover keeps a few"
    mover.close()
    assert (maker.pinned, maker.too_early) == ({}, 0)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_driver_that_refuses_to_pin_is_asked_for_nothing_more(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(monkeypatch)
    called: list[tuple[object, ...]] = []
    warned: list[str] = []

    def call(name: str, address: ctypes.c_void_p, *rest: Any) -> None:
        assert driver.WHOLE_DEVICE.locked() and called[-1] == ("context", 0)
        called.append((name, address.value, *(one.value for one in rest)))
        if refuses:
            raise RuntimeError(f"{name} failed: not permitted (800)")

    monkeypatch.setattr(driver, "call", call)
    monkeypatch.setattr(
        cuda_device, "enter_context", lambda index: called.append(("context", index))
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(uuid="GPU-1")
    )
    monkeypatch.setattr(cuda_device._log, "warning", lambda event, **_named: warned.append(event))
    memory = torch.zeros(64, dtype=torch.uint8)
    CudaMaker(torch.device("cuda", 0)).pin(memory)()
    pinned: list[tuple[object, ...]]
    pinned = [("context", 0), ("cuMemHostRegister_v2", memory.data_ptr(), 64, 0)]
    unpinned: list[tuple[object, ...]]
    unpinned = [("context", 0), ("cuMemHostUnregister", memory.data_ptr())]
    assert called == (pinned if refuses else pinned + unpinned)
    assert len(warned) == refuses
