"""A GPU as ``engine.device`` sees it, and the memory that its processes share.

The same code runs without a GPU: ``interpreter`` is the CPU's memory, shared by descriptor like a
GPU's, and the same kernels in Triton's interpreter. It is for tests, and very slow.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine import sampler
from pagemesh.engine.cuda import driver
from pagemesh.engine.cuda import sampler as device_sampler
from pagemesh.engine.cuda.memory import DeviceMemory, enter_context
from pagemesh.engine.device_memory import HostMemory, MappedMemory, MemoryMaker
from pagemesh.engine.worker.plan import Drawn, Sample, TokenScores
from pagemesh.kernels.ops import KvPool
from pagemesh.kernels.page_copy import check_copies
from pagemesh.runtime.logs import get_logger
from pagemesh.wire.errors import NoCapacity

I64 = NDArray[np.int64]
INTERPRETER = "interpreter"
"""The place of memory on the CPU that is shared like a GPU's."""
_log = get_logger(__name__)


class GpuDevice:
    """``engine.device.StepDevice`` with Triton's kernels."""

    def __init__(self, device: torch.device, maker: MemoryMaker) -> None:
        # Imported only once there is a device to run on, since this module imports Triton.
        from pagemesh.kernels.page_copy.triton import page_copy

        self._page_copy = page_copy
        self._is_async = device.type == "cuda"
        self.device = device
        self.place = maker.place

    def copy_pages(self, pool: KvPool, copies: Sequence[tuple[int, int]]) -> None:
        check_copies(pool, copies)
        if copies:
            self._page_copy(pool, copies)

    def draw(self, logits: torch.Tensor, rows: I64, samples: Sequence[Sample]) -> tuple[Drawn, ...]:
        return device_sampler.draw(logits, rows, samples)

    def score(self, logits: torch.Tensor, targets: I64, width: int) -> TokenScores:
        return sampler.score(logits.cpu().numpy(), targets, width)

    def finish(self) -> None:
        """See ``StepDevice``. Waits for this thread's stream, which runs the steps, and not for
        pages that are moved meanwhile."""
        if self._is_async:
            torch.cuda.current_stream(self.device).synchronize()


class CudaMaker:
    """Memory of a GPU. ``place`` names the card itself, whatever its index in a process."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index or 0
        # Made only once, before any other: torch hands out a few in turn, and graphs are captured
        # on another.
        self._stream = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        self.place = f"cuda:{torch.cuda.get_device_properties(self._index).uuid}"

    def make(self, size_bytes: int) -> int:
        """See ``MemoryMaker``; the descriptor alone holds the memory."""
        try:
            with DeviceMemory.make(size_bytes, self._index) as made:
                return made.export()
        except driver.OutOfMemory:
            free, total = torch.cuda.mem_get_info(self._index)
            name = torch.cuda.get_device_name(self._index)
            raise NoCapacity(
                f"PAGEMESH_POOL_BYTES (--pool-bytes): the pool takes {size_bytes >> 20} MiB, "
                f"{free >> 20} of {total >> 20} MiB are free on {name} beside the weights; lower it"
            ) from None

    def map(self, descriptor: int, size_bytes: int) -> MappedMemory:
        return DeviceMemory.adopt(descriptor, size_bytes, self._index)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """See ``MemoryMaker``. If the driver refuses, copies go through the driver's own memory."""
        # Through the driver: the runtime would report a failure again to its next caller.
        address = ctypes.c_void_p(memory.data_ptr())
        with driver.WHOLE_DEVICE:
            enter_context(self._index)
            try:
                size = ctypes.c_size_t(memory.numel())
                driver.call("cuMemHostRegister_v2", address, size, ctypes.c_uint(0))
            except RuntimeError as error:
                _log.warning(
                    "worker.staging_not_pinned", why=str(error), bytes=memory.numel(),
                    remedy="none is needed; copies of pages from and to the device take longer",
                )  # fmt: skip
                return _nothing

        def unpin() -> None:
            with driver.WHOLE_DEVICE:
                enter_context(self._index)
                driver.call("cuMemHostUnregister", address)

        return unpin

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """See ``MemoryMaker``: on a stream of its own, which steps do not wait for."""
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()


class SharedMaker:
    """Unnamed memory of the host, in place of a GPU's."""

    place = INTERPRETER

    def make(self, size_bytes: int) -> int:
        """See ``MemoryMaker``."""
        descriptor = os.memfd_create("pagemesh-pool", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            os.close(descriptor)
            raise NoCapacity(
                f"PAGEMESH_POOL_BYTES (--pool-bytes): no {size_bytes >> 20} MiB of memory for the "
                f"pool ({error.strerror}); lower it"
            ) from None
        return descriptor

    def map(self, descriptor: int, size_bytes: int) -> MappedMemory:
        return HostMemory(descriptor, size_bytes)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        return _nothing

    def copying(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


def _nothing() -> None: ...
