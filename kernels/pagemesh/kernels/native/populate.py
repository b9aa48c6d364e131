"""The memory of a pool before anybody computes with it: cleared by who makes the file, mapped page
by page by who attaches to it.

Each page of 4 KiB that a process uses for the first time is a fault, in the middle of a step, and
K and V of a prompt lie on thousands of them. The first process of all waits for the kernel to
clear the page too, which takes twenty times as long as to map one that is there. So the pager
clears what it can before it says that there is a pool (``clear``), and ``MADV_POPULATE_READ``
(Linux 5.14) then maps many pages in one call, to be written to as well, from a thread of a
worker's own. While such a call runs nobody in the process can map or unmap anything, so each is
short.

A GiB that was cleared is mapped in a tenth of a second. A pool that was not, since it is too large,
has its turn now and then: the other threads of a step wait for whatever this takes of a core.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time

import numpy as np
from numpy.typing import NDArray

_POPULATE_READ = 22
CLEAR_S = 4.0
"""How long the maker of a pool clears it: a GiB takes a tenth of a second, or two where a virtual
machine's host has yet to give the memory."""
_ZEROS = memoryview(bytes(1 << 20))
SLICE_BYTES = 256 << 10
"""What is mapped in one call, which takes a fraction of a millisecond."""
EAGER_S = 2.0
PAUSE_S = 0.004
_MEMORY_KINDS = (0x0102_1994, 0x8584_58F6)
"""tmpfs and ramfs, as ``statfs`` names them. Elsewhere pages that were mapped to be written to
would all be read from the disk, and be written back."""
_STATFS_BYTES = 256
"""More than a ``struct statfs`` has; its first word says what kind of file system it is."""


def is_memory(descriptor: int) -> bool:
    """Whether a file is in memory and nowhere else."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None).fstatfs(descriptor, found):
        return False
    return ctypes.c_long.from_buffer(found).value & 0xFFFF_FFFF in _MEMORY_KINDS


def clear(descriptor: int, size_bytes: int, *, within_s: float = CLEAR_S) -> int:
    """Write zeros to a new file in memory, from its start on, until ``within_s`` are over. Returns
    how many bytes of ``size_bytes`` that were. Raises ``OSError`` where there is no memory."""
    until_s, at = time.monotonic() + within_s, 0
    while at < size_bytes and time.monotonic() < until_s:
        at += os.pwrite(descriptor, _ZEROS[: size_bytes - at], at)
    return at


class Populating:
    """Maps ``memory``, uint8, from its start on, in a thread. What is in it stays as it is. Where
    the kernel cannot, nothing happens."""

    def __init__(
        self, memory: NDArray[np.uint8], *, eager_s: float = EAGER_S, pause_s: float = PAUSE_S
    ) -> None:
        """Without pauses for ``eager_s``, with ``pause_s`` between two calls after it."""
        self._memory = memory
        self._eager_s, self._pause_s = eager_s, pause_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether it is over, at the latest after so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Let go of the memory soon. It stays mapped until then."""
        self._stopped.set()

    def _run(self) -> None:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        first = self._memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        end = self._memory.ctypes.data + self._memory.nbytes
        eager_until_s = time.monotonic() + self._eager_s
        for at in range(first, end, SLICE_BYTES):
            if advise(at, min(SLICE_BYTES, end - at), _POPULATE_READ):
                return
            is_eager = time.monotonic() < eager_until_s
            if self._stopped.wait(0.0 if is_eager else self._pause_s):
                return
