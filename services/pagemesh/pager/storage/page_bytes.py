"""The bytes of a pool's pages, as whoever keeps them elsewhere wants them: taken, and filled.

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
"""Copied on the event loop: that takes as long as waking a thread."""


class Filling(Protocol):
    """Some pages that are being filled, one after the other; on one thread."""

    @property
    def settled(self) -> int:
        """How many of the first are in the pool."""
        ...

    def close(self) -> None:
        """No more of them will be."""
        ...

    def row(self, at: int) -> memoryview:
        """Where the bytes of the page ``at`` go; asked for in order. Raises like ``settle``."""
        ...

    def settle(self, count: int) -> None:
        """Have the first ``count`` in the pool. Raises ``Fault`` when they cannot be brought
        there; nobody writes into any of them by then, unless this life is over."""
        ...


class PageBytes(Protocol):
    """Of one pool, for one life of a pager. Asked on the event loop."""

    is_patient: bool
    """Whether ``take`` may take seconds, nobody else being served."""

    @property
    def can_take(self) -> bool:
        """Whether there is a way to the bytes at all."""
        ...

    async def take(self, pages: Pages) -> Bytes:
        """A copy: uint8 [pages, page_bytes]. Raises ``Fault`` when they cannot be had."""
        ...

    def filling(self, pages: Pages, mover: int) -> Filling:
        """To fill ``pages``. ``mover``: the worker incarnation in whose name they are held."""
        ...

    def stop(self) -> None:
        """Wait for nobody any more: this life of the pager ends."""
        ...

    def close(self) -> None:
        """Nobody asks any more, and no thread is at it."""
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
        """See ``PageBytes``: right where they are, so that a page is whole when it is read."""
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
