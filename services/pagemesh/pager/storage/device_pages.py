"""Pages on a device, moved by the hand of a worker: the pager has no device.

    take    pool --a worker copies--> [ staging ] --> bytes that are ours
    fill    bytes that were read and verified --> [ staging ] --a worker copies--> pool

Staging is memory of the host that pager and worker have mapped both. Whom the copy is asked of
matters, since a worker may stand still in the middle of it and go on whenever it likes:

- *out of the pool* any will do. One that does not answer soon is left alone for a while, and the
  staging memory, into which it may write still, is given up for another.
- *into the pool* it is the worker in whose name the pages are held (their headers say so): nothing
  else happens to them until it has answered, or its process has ended. The next pager leaves them
  draining until then, as it does with all that a worker may be writing.
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
"""What a worker may take to copy pages out; the pager does nothing else meanwhile."""
_REST_S = 5.0
"""How long one that did not answer is not asked."""
_STAGING_BYTES_MAX = 32 << 20
_IDLE_STAGING_MAX = 2
_log = get_logger(__name__)


class _Staging:
    """Rows of a page each, in a file without a name."""

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
        """The map goes with the last view of it."""
        os.close(self.descriptor)


class DevicePages:
    """Of one pool and one life of the pager. ``page_bytes.PageBytes`` says what is what."""

    def __init__(self, facts: PoolFacts, memory: PoolMemory, holders: Holders) -> None:
        self._facts, self._memory, self._holders = facts, memory, holders
        self._row_count = max(1, min(MOVED_PAGES_MAX, _STAGING_BYTES_MAX // facts.page_bytes))
        self._closing = threading.Event()
        self.is_patient = False
        self._idle: list[_Staging] = []
        self._lock = threading.Lock()
        """Held while ``_idle`` is changed."""
        self._resting: dict[str, float] = {}
        """Until when workers, by the names of their locks, are not asked to copy pages out."""

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
        """Memory that nobody else uses. Raises ``Busy`` when there is none to be had."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return _Staging(self._row_count, self._facts.page_bytes)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise Busy(f"no memory to move pages through ({reason})", retry_after_ms=500) from None

    def give_back(self, staging: _Staging) -> None:
        """Nobody uses it any more, nor will a worker write into it."""
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
                staging.close()  # a worker that did not answer may write there still
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
        """Have the worker behind ``lock`` copy the first rows of ``staging`` into ``table``. Raises
        ``Fault``; it is not at work on them any more by then, unless this life is over."""
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
    """Pages that are filled by way of staging memory, as many at once as it holds."""

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
