"""The memory of a mapped pool, mapped page by page before anybody computes with it.

Each page of 4 KiB that a process writes to for the first time is a fault, in the middle of a step,
and K and V of a prompt lie on thousands of them. ``MADV_POPULATE_WRITE`` (Linux 5.14) maps many in
one call, from a thread of its own. While such a call runs nobody in the process can map or unmap
anything, so each is short.

A pool that has just come is mapped without pauses for a while: two GiB take a second or two, before
the first request or soon after it. What is left of a larger one has its turn now and then, since
the other threads of a step wait for whatever this takes of a core.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time

import numpy as np
from numpy.typing import NDArray

_POPULATE_WRITE = 23
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
            if advise(at, min(SLICE_BYTES, end - at), _POPULATE_WRITE):
                return
            is_eager = time.monotonic() < eager_until_s
            if self._stopped.wait(0.0 if is_eager else self._pause_s):
                return
