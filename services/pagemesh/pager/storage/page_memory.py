"""The pages of the disk tier that were written or read last, kept in memory as well.

    store --> disk, and a row here        load <-- the row, or disk and then a row here

Rows are verified like pages from disk, so a row can only save a read. The operating system caches
files in memory too, but only while nobody else wants that memory; these rows are kept.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict

import numpy as np

from pagemesh.pager.storage.page_bytes import Bytes


class PageMemory:
    """Rows by slot, as many as ``bytes_max`` holds; the least recently used is evicted first. Safe
    to use from several threads; nobody reads a slot that is being written."""

    def __init__(self, page_bytes: int, bytes_max: int) -> None:
        self._rows: Bytes = np.empty((bytes_max // page_bytes, page_bytes), np.uint8)
        """Takes up memory only as rows are used."""
        self.page_count = len(self._rows)
        """How many pages there is room for."""
        self._row_of: OrderedDict[int, int] = OrderedDict()
        """By slot, the least recently used first."""
        self._free = list(range(len(self._rows) - 1, -1, -1))
        self._lock = threading.Lock()

    def put(self, slot: int, page: memoryview) -> None:
        """Keep ``page``, which ``slot`` holds."""
        if not len(self._rows):
            return
        with self._lock:
            row = self._row_of.pop(slot, None)
            if row is None:
                row = self._free.pop() if self._free else self._row_of.popitem(last=False)[1]
            self._row_of[slot] = row
            self._rows[row] = page

    def get(self, slot: int, target: memoryview) -> bool:
        """Copy into ``target`` what ``slot`` holds; False if it is not in memory."""
        with self._lock:
            row = self._row_of.get(slot)
            if row is None:
                return False
            self._row_of.move_to_end(slot)
            target[:] = memoryview(self._rows[row])
            return True

    def drop(self, slot: int) -> None:
        """Forget what ``slot`` held."""
        with self._lock:
            row = self._row_of.pop(slot, None)
            if row is not None:
                self._free.append(row)


def page_memory(page_bytes: int, memory_bytes: int) -> PageMemory:
    """Raises ``OSError`` if there is not enough memory."""
    try:
        return PageMemory(page_bytes, memory_bytes)
    except MemoryError:
        wanted = f"PAGEMESH_HOST_BYTES={memory_bytes} (--host-bytes)"
        raise OSError(errno.ENOMEM, f"there is no memory for {wanted}; give less") from None
