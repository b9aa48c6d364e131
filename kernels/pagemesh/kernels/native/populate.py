"""Prepares the memory of a pool before it is computed with: the process that creates the file
clears it, and each process that attaches maps it ahead of its use.

The first time that a process uses a page of 4 KiB it takes a page fault, in the middle of a step,
and K and V of a prompt lie on thousands of pages. The first process of all also waits for the
kernel to clear the page, which takes twenty times as long as mapping one that exists. So the pager
clears what it can before it announces the pool (``clear``), and each worker has a thread that then
maps many pages per call, for writing as well, with ``MADV_POPULATE_READ`` (Linux 5.14). While such
a call runs the process cannot map or unmap anything, so each call is short.

A GiB that was cleared is mapped in a tenth of a second. A pool that is too large to be cleared is
mapped with pauses: the other threads of a step wait for whatever time this takes from a core.
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
"""How long a pool's creator clears it. A GiB takes 0.1 s, or several times as long where a virtual
machine's host has yet to supply the memory."""
_ZEROS = memoryview(bytes(1 << 20))
SLICE_BYTES = 256 << 10
"""What is mapped in one call, which takes a fraction of a millisecond."""
EAGER_S = 2.0
PAUSE_S = 0.004
_MEMORY_KINDS = (0x0102_1994, 0x8584_58F6)
"""tmpfs and ramfs, as ``statfs`` names them. On other file systems, pages that are mapped for
writing would all be read from the disk, and written back."""
_STATFS_BYTES = 256
"""More than a ``struct statfs`` takes; its first word is the type of the file system."""


def is_memory(descriptor: int) -> bool:
    """Whether a file exists only in memory."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None).fstatfs(descriptor, found):
        return False
    return ctypes.c_long.from_buffer(found).value & 0xFFFF_FFFF in _MEMORY_KINDS


def clear(descriptor: int, size_bytes: int, *, within_s: float = CLEAR_S) -> int:
    """Write zeros to a new file in memory, from its start on, for up to ``within_s``. Returns how
    many of ``size_bytes`` were written. Raises ``OSError`` when memory runs out."""
    until_s, at = time.monotonic() + within_s, 0
    while at < size_bytes and time.monotonic() < until_s:
        at += os.pwrite(descriptor, _ZEROS[: size_bytes - at], at)
    return at


class Populating:
    """Maps ``memory``, uint8, from its start on, in a thread, and leaves its content as it is. Does
    nothing if the kernel does not support it."""

    def __init__(
        self, memory: NDArray[np.uint8], *, eager_s: float = EAGER_S, pause_s: float = PAUSE_S
    ) -> None:
        """Without pauses for ``eager_s``, then with ``pause_s`` between two calls."""
        self._memory = memory
        self._eager_s, self._pause_s = eager_s, pause_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the mapping, at most ``seconds``; returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Release the memory soon. It stays mapped until then."""
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
