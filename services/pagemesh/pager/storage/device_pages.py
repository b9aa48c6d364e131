"""Pages on a device, which workers copy for the pager: it uses no device itself.

    take    pool --a worker copies--> [ staging ] --> our own copy of the bytes
    fill    bytes that were read and verified --> [ staging ] --a worker copies--> pool

Staging is host memory that both the pager and the worker map. It matters which worker is asked for
a copy, since one may stall in the middle of it and resume at any time:

- *Out of the pool*, any worker will do. One that does not answer soon is not asked again for a
  while, and the staging memory, to which it may still write, is abandoned.
- *Into the pool*, it is the worker in whose name the pages are held (their headers say so). Nothing
  else happens to them until it has answered or its process has ended. A new pager leaves them
  draining until then, like everything that a worker may be writing.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.pages.runs import Pages, table_of
from pagemesh.pager.storage.holders import Holders
from pagemesh.pager.storage.page_bytes import Bytes, Filling, MappedPages, PageBytes
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.runtime.logs import get_logger
from pagemesh.wire.errors import Busy, Fault, Gone
from pagemesh.wire.pool_format import IN_FILE
from pagemesh.wire.pool_memory import MOVED_PAGES_MAX, Direction, MovePages
from pagemesh.wire.tokens import U32, pack_extents

OUT_S_MAX, PATIENT_S_MAX = 0.5, 4.0
"""How long a worker may take to copy pages out, usually and if ``is_patient``; the pager does
nothing else meanwhile."""
_REST_S = 5.0
"""How long a worker that did not answer is not asked again."""
_STAGING_BYTES_MAX = 32 << 20
_IDLE_STAGING_MAX = 2
_log = get_logger(__name__)


class _Staging:
    """Rows of one page each, in an anonymous file in memory."""

    def __init__(self, row_count: int, page_bytes: int) -> None:
        self.descriptor = os.memfd_create("pagemesh-staging", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, row_count * page_bytes)
            mapped = mmap.mmap(self.descriptor, row_count * page_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.rows: Bytes = np.frombuffer(mapped, np.uint8).reshape(row_count, page_bytes)

    def close(self) -> None:
        """Close the file; its mapping goes with the last view of it."""
        os.close(self.descriptor)


class DevicePages:
    """The device pages of one pool, for one life of the pager. See ``page_bytes.PageBytes``."""

    def __init__(self, facts: PoolFacts, memory: PoolMemory, holders: Holders) -> None:
        self._facts, self._memory, self._holders = facts, memory, holders
        self._row_count = max(1, min(MOVED_PAGES_MAX, _STAGING_BYTES_MAX // facts.page_bytes))
        self._closing = threading.Event()
        self.is_patient = False
        self._idle: list[_Staging] = []
        self._lock = threading.Lock()
        """Held while ``_idle`` is changed."""
        self._resting: dict[str, float] = {}
        """By name of its lock, until when a worker is not asked to copy pages out."""

    @property
    def can_take(self) -> bool:
        """See ``PageBytes``."""
        return bool(self._holders.living())

    async def take(self, pages: Pages) -> Bytes:
        """See ``PageBytes``. Raises ``Busy`` when no worker copies them."""
        locks = [holder.lock_name for holder in self._holders.living()]
        return await asyncio.to_thread(self._take, table_of(pages), locks)

    def filling(self, pages: Pages, mover: int) -> Filling:
        """See ``PageBytes``."""
        return _Moved(self, table_of(pages), self._holders.lock_name(mover))

    def stop(self) -> None:
        """See ``PageBytes``."""
        self._closing.set()

    def close(self) -> None:
        """See ``PageBytes``."""
        for staging in self._idle:
            staging.close()
        self._idle.clear()

    # On threads

    def staging(self) -> _Staging:
        """Staging memory that nobody else uses. Raises ``Busy`` if none can be allocated."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return _Staging(self._row_count, self._facts.page_bytes)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise Busy(f"no memory for staging pages ({reason})", retry_after_ms=500) from None

    def give_back(self, staging: _Staging) -> None:
        """Take back ``staging``, which nobody uses and no worker will write to any more."""
        with self._lock:
            if len(self._idle) < _IDLE_STAGING_MAX and not self._closing.is_set():
                self._idle.append(staging)
                return
        staging.close()

    def _take(self, table: U32, locks: Sequence[str]) -> Bytes:
        taken = np.empty((len(table), self._facts.page_bytes), np.uint8)
        for at in range(0, len(table), self._row_count):
            part = table[at : at + self._row_count]
            self._copy_out(part, taken[at : at + len(part)], locks)
        return taken

    def _copy_out(self, table: U32, target: Bytes, locks: Sequence[str]) -> None:
        message = self._message("out", table)
        for lock in locks:
            if self._resting.get(lock, 0.0) > time.monotonic() and not self.is_patient:
                continue
            staging = self.staging()
            try:
                limit_s = PATIENT_S_MAX if self.is_patient else OUT_S_MAX
                self._memory.move_out(message, lock, staging.descriptor, limit_s)
            except Fault as fault:
                staging.close()  # a worker that did not answer may still write there
                now_s = time.monotonic()
                self._resting = {one: s for one, s in self._resting.items() if s > now_s}
                self._resting[lock] = now_s + _REST_S
                _log.warning("pager.pages_not_copied", lock=lock, reason=fault.message)
            else:
                target[:] = staging.rows[: len(target)]
                self.give_back(staging)
                return
        raise Busy("no worker copies pages out of the device", retry_after_ms=500)

    def copy_in(self, staging: _Staging, table: U32, lock: str) -> None:
        """Have the worker that holds ``lock`` copy the first rows of ``staging`` to the pages
        ``table``. Raises ``Fault``; by then it no longer does so, unless this life is over."""
        message = self._message("in", table)
        self._memory.move_in(message, lock, staging.descriptor, self._closing.is_set)

    def _message(self, direction: Direction, table: U32) -> MovePages:
        facts = self._facts
        return MovePages(
            direction=direction, pool_incarnation=facts.incarnation,
            size_bytes=facts.page_count * facts.page_bytes, page_bytes=facts.page_bytes,
            extents=pack_extents(table),
        )  # fmt: skip


def page_bytes_of(store: PoolStore, memory: PoolMemory, holders: Holders) -> PageBytes:
    """The bytes of the pool's pages, wherever those are."""
    if store.facts.place == IN_FILE:
        return MappedPages(store.facts, store.file.pages)
    return DevicePages(store.facts, memory, holders)


class _Moved:
    """Pages that are filled through staging memory, as many at a time as it holds."""

    def __init__(self, pages: DevicePages, table: U32, lock: str | None) -> None:
        self._pages, self._table, self._lock = pages, table, lock
        self._staging: _Staging | None = None
        self.settled = 0

    def row(self, at: int) -> memoryview:
        staging = self._staging = self._staging or self._pages.staging()
        if at - self.settled == len(staging.rows):
            self.settle(at)
        return memoryview(staging.rows[at - self.settled])

    def settle(self, count: int) -> None:
        if count == self.settled:
            return
        if self._lock is None:
            raise Gone("the worker that was to move the pages has ended")
        assert self._staging is not None
        self._pages.copy_in(self._staging, self._table[self.settled : count], self._lock)
        self.settled = count

    def close(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            self._pages.give_back(staging)
