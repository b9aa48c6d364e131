"""The memory of a mapped pool, mapped page by page before anybody computes with it.

Each page of 4 KiB that a process writes to for the first time is a fault, in the middle of a step,
and K and V of a prompt lie on thousands of them. Asked for in one call (``MADV_POPULATE_WRITE``,
Linux 5.14) they take about as long, but nobody waits.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import numpy as np
from numpy.typing import NDArray

_POPULATE_WRITE = 23
_SLICE_BYTES = 16 << 20
"""What is mapped in one call, of some milliseconds."""
_NICE = 19


class Populating:
    """Maps ``memory``, uint8, from its start on, in a thread that gives way to all others. What
    is in it stays as it is. Where the kernel cannot, nothing happens."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
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
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        first = self._memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        end = self._memory.ctypes.data + self._memory.nbytes
        for at in range(first, end, _SLICE_BYTES):
            if self._stopped.is_set():
                return
            if advise(at, min(_SLICE_BYTES, end - at), _POPULATE_WRITE):
                return
