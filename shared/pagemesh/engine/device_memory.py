"""Memory that processes share by file descriptor, on a device or the host, and copies between both.

MemoryMaker    makes and maps the memory of a pool's pages
HostMemory     memory of the host, mapped
PageMover      copies pages between the two, on the pager's behalf (``MovePages``)
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from pagemesh.wire.errors import Malformed
from pagemesh.wire.pool_memory import MOVED_PAGES_MAX, MovePages
from pagemesh.wire.tokens import unpack, unpack_extents

_STAGING_KEPT_MAX = 3
"""Staging files kept mapped: the pager uses one to copy out, one to copy in, and more when it has
to wait."""


class MappedMemory(Protocol):
    """``bytes``: uint8 tensor, at least as large as asked for; not to be used after ``close``."""

    @property
    def bytes(self) -> torch.Tensor: ...

    def close(self) -> None: ...


class MemoryMaker(Protocol):
    """Memory of one place that processes share by file descriptor. Any thread may call."""

    @property
    def place(self) -> str:
        """Where the memory is; processes whose places are equal can map each other's memory."""
        ...

    def make(self, size_bytes: int) -> int:
        """The descriptor of new memory, zeroed. Raises ``NoCapacity`` when there is not enough."""
        ...

    def map(self, descriptor: int, size_bytes: int) -> MappedMemory:
        """Map what ``make`` made in this or another process; ``descriptor`` stays the caller's.
        Raises ``RuntimeError``."""
        ...

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Pin host ``memory`` (uint8), where possible, so that the device can access it directly.
        The returned function unpins it and must be called before the memory is unmapped."""
        ...

    def copying(self) -> AbstractContextManager[None]:
        """A context for copies: those begun within it run beside the device's other work. When it
        is left, also by an exception, they are done and visible to every process."""
        ...


class HostMemory:
    """An unnamed file, mapped: uint8 ``bytes``. ``descriptor`` stays the caller's. Raises
    ``OSError``, and ``ValueError`` when the file is shorter."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._map = mmap.mmap(descriptor, size_bytes)
        self.bytes = torch.from_numpy(np.frombuffer(self._map, np.uint8))

    def close(self) -> None:
        """Unmap the file, or leave that to the release of the last view of it."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        try:
            self._map.close()
        except BufferError:
            # Triton's interpreter leaves kernel arguments in reference cycles, which would never be
            # collected in an idle worker.
            gc.collect()
            with contextlib.suppress(BufferError):
                self._map.close()


class PageMover:
    """One thread at a time. Mappings are kept, since the next message mostly needs the same."""

    def __init__(self, maker: MemoryMaker) -> None:
        self._maker = maker
        self._pool: tuple[int, MappedMemory] | None = None
        self._staging: OrderedDict[tuple[int, int], tuple[HostMemory, Callable[[], None]]]
        self._staging = OrderedDict()
        """By file, with the function that unpins it; the least recently used first."""

    def move(self, message: MovePages, memory: int, staging: int) -> None:
        """Copy between the pool's ``memory`` and ``staging``; both descriptors stay the caller's.
        Raises ``Malformed`` for pages that lie beyond either, ``RuntimeError`` from the device."""
        size = message.page_bytes
        table = unpack_extents(message.extents, page_count_max=MOVED_PAGES_MAX)
        page_count = message.size_bytes // size
        if int(table.max()) >= page_count:
            raise Malformed(f"page {int(table.max())} of a pool of {page_count}")
        if os.fstat(staging).st_size < len(table) * size:
            raise Malformed(f"staging memory holds no {len(table)} pages of {size} bytes")
        pages = self._pages(message, memory)[: page_count * size].view(page_count, size)
        rows = self._rows(staging)[: len(table) * size].view(len(table), size)
        at = 0
        with self._maker.copying():
            for first, count in unpack(message.extents).reshape(-1, 2).tolist():
                inside, outside = pages[first : first + count], rows[at : at + count]
                if message.direction == "in":
                    inside.copy_(outside, non_blocking=True)
                else:
                    outside.copy_(inside, non_blocking=True)
                at += count

    def keep_only(self, pool: int) -> None:
        """Unmap the memory of any pool but ``pool``, so that it can be freed."""
        if self._pool is not None and self._pool[0] != pool:
            self._pool[1].close()
            self._pool = None

    def close(self) -> None:
        """Unmap everything."""
        self.keep_only(-1)
        while self._staging:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        mapped, unpin = self._staging.popitem(last=False)[1]
        unpin()
        mapped.close()

    def _pages(self, message: MovePages, memory: int) -> torch.Tensor:
        self.keep_only(message.pool_incarnation)
        if self._pool is None:
            mapped = self._maker.map(memory, message.size_bytes)
            self._pool = message.pool_incarnation, mapped
        return self._pool[1].bytes

    def _rows(self, staging: int) -> torch.Tensor:
        found = os.fstat(staging)
        file = found.st_dev, found.st_ino  # unique as long as the file is mapped
        kept = self._staging.pop(file, None)
        if kept is None:
            while len(self._staging) >= _STAGING_KEPT_MAX:
                self._drop_oldest()
            mapped = HostMemory(staging, found.st_size)
            kept = mapped, self._maker.pin(mapped.bytes)
        self._staging[file] = kept
        return kept[0].bytes
