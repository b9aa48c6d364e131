"""The bytes of a pool's pages, for a tier that keeps them elsewhere: taken out, and filled in.

MappedPages     they are in the pool's file, which is mapped here
DevicePages     they are on a device: a worker moves them (``device_pages``)
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.pages.runs import Pages, table_of

Bytes = NDArray[np.uint8]
_INLINE_BYTES_MAX = 1 << 20
"""Copies up to this size are made on the event loop: that takes no longer than waking a thread."""


class Filling(Protocol):
    """Pages that are being filled, one after the other, on one thread."""

    @property
    def settled(self) -> int:
        """How many of the pages, from the first on, are in the pool."""
        ...

    def close(self) -> None:
        """No more of them will be filled."""
        ...

    def row(self, at: int) -> memoryview:
        """The buffer for the bytes of page ``at``; asked for in order. Raises like ``settle``."""
        ...

    def settle(self, count: int) -> None:
        """Get the first ``count`` pages into the pool. Raises ``Fault`` if that fails; by then
        nobody writes into any of them, unless this life is over."""
        ...


class PageBytes(Protocol):
    """The page bytes of one pool, for one life of a pager. Used on the event loop."""

    is_patient: bool
    """Whether ``take`` may take seconds, because nobody else is being served."""

    @property
    def can_take(self) -> bool:
        """Whether the bytes can be reached at all."""
        ...

    async def take(self, pages: Pages) -> Bytes:
        """A copy: uint8 [pages, page_bytes]. Raises ``Fault`` if none can be made."""
        ...

    def filling(self, pages: Pages, mover: int) -> Filling:
        """Begin to fill ``pages``, held in the name of the worker incarnation ``mover``."""
        ...

    def stop(self) -> None:
        """Stop waiting for workers: this life of the pager ends."""
        ...

    def close(self) -> None:
        """Free everything. No call follows, and no thread is at work."""
        ...


class MappedPages:
    """``pool`` is uint8 [page_count * page_bytes], mapped."""

    can_take, is_patient = True, False

    def __init__(self, facts: PoolFacts, pool: Bytes) -> None:
        self._page_bytes = facts.page_bytes
        self._pool = pool.reshape(facts.page_count, facts.page_bytes)

    async def take(self, pages: Pages) -> Bytes:
        """See ``PageBytes``."""
        if len(pages) * self._page_bytes <= _INLINE_BYTES_MAX:
            return self._copy(pages)
        return await asyncio.to_thread(self._copy, pages)

    def filling(self, pages: Pages, mover: int = 0) -> Filling:
        """See ``PageBytes``. Pages are filled in place, so each is settled once it is read."""
        return _InPlace(self._pool, pages)

    def stop(self) -> None:
        """See ``PageBytes``."""

    def close(self) -> None:
        """See ``PageBytes``."""

    def _copy(self, pages: Pages) -> Bytes:
        return self._pool.take(table_of(pages), axis=0)


class _InPlace:
    def __init__(self, pool: Bytes, pages: Pages) -> None:
        self._pool, self._table = pool, table_of(pages)
        self.settled = 0

    def row(self, at: int) -> memoryview:
        return memoryview(self._pool[self._table[at]])

    def settle(self, count: int) -> None:
        self.settled = count

    def close(self) -> None:
        pass
