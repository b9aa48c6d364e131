"""The ledger of a pool: the state of each page, and which pages are free.

         take                commit                      evict
    FREE -----> HELD --------------------> COMMITTED ------------+
     ^           ^ |  ^                    pinned <-> idle       |
     |           | |  | resume                pin / unpin        |
     |           | |  |         reuse                            |
     |           +-|--|------------------------------------------+
     |   drain     v  |                       strand             |
     +------- DRAINING <---------------------------- (idle)      |
     |  settle                                                   |
     +--- free (from HELD) <-------------------------------------+

At every moment ``free + held + pinned + idle + draining = total``. Only the prefix tree knows
which committed pages are pinned; it reports changes as counts.

Most grants are one run of pages (see ``runs`` and ``free_pages``), which is moved, numbered and
checked as a slice, so its length hardly matters.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.pages.column import Column, Numbers, U64Array
from pagemesh.pager.pages.free_pages import FreePages
from pagemesh.pager.pages.ledger_error import LedgerError
from pagemesh.pager.pages.runs import Pages, Run, first_of, part, where
from pagemesh.wire.pool_format import HeaderState

_FREE: Final = int(HeaderState.FREE)
_HELD: Final = int(HeaderState.HELD)
_COMMITTED: Final = int(HeaderState.COMMITTED)
_DRAINING: Final = int(HeaderState.DRAINING)
_AS_BYTE: Final = [bytearray([state]) for state in range(5)]
_RAMP_COUNT: Final = 4_096
_TOLD_MAX = 8


Grant = tuple[Pages, Run]
"""Pages that have become held, and their new ledger sequences."""


class PagePool:
    """Page states, reuse sequences and identities of ``page_count`` pages.

    Ledger numbers start above ``first_sequence`` and only grow. A page has two of them: the
    *sequence* of its last grant (the fence) and, once committed, its *identity*.
    """

    __slots__ = (
        "_free", "_identities", "_ramp", "_ramp_first", "_ramp_view", "_sequences", "_states",
        "_view", "draining", "evicted", "free", "held", "idle", "last_sequence", "pinned", "total",
    )  # fmt: skip

    def __init__(self, page_count: int, first_sequence: int) -> None:
        self.total = self.free = page_count
        self.held = self.pinned = self.idle = self.draining = 0
        self.evicted = 0
        self.last_sequence = first_sequence
        self._sequences, self._identities = Column(page_count), Column(page_count)
        # Two views of the same bytes: runs are compared and set as bytes, others through numpy.
        self._states = bytearray(page_count)
        self._view: NDArray[np.uint8] = np.frombuffer(self._states, np.uint8)
        self._free = FreePages(page_count)
        # Consecutive numbers, likely the next to be given out: copying is cheaper than making them.
        self._ramp_first = 0
        self._ramp: U64Array = np.arange(_RAMP_COUNT, dtype=np.uint64)
        self._ramp_view = self._ramp.data.cast("B").cast("Q")

    @property
    def states(self) -> NDArray[np.uint8]:
        """``HeaderState`` of each page, as a read-only view."""
        view = self._view.view()
        view.setflags(write=False)
        return view

    @property
    def sequences(self) -> U64Array:
        """The sequence of each page; to be written only before anything is granted."""
        return self._sequences.numbers

    @property
    def identities(self) -> U64Array:
        """The identity of each page; to be written only before anything is granted."""
        return self._identities.numbers

    def identity_of(self, page: int) -> int:
        return self._identities.one(page)

    def number(self, count: int = 1) -> int:
        """Reserve ``count`` ledger numbers and return the first of them."""
        first = self.last_sequence + 1
        self.last_sequence += count
        return first

    def renumber(self, pages: Pages) -> Run:
        """Give ``pages`` new, consecutive, larger sequences and return them. This fences off every
        earlier holder of the pages."""
        return self._count_up(self._sequences, pages)

    def _count_up(self, column: Column, pages: Pages) -> Run:
        count = len(pages)
        first = self.last_sequence + 1
        self.last_sequence += count
        stop = first + count
        if count == 1:
            column.put_one(first_of(pages), first)
        elif count:
            column.put(pages, self._numbers(first, count))
        return Run(first, stop)

    def _numbers(self, first: int, count: int) -> memoryview:
        """``count`` consecutive numbers from ``first``, which must be larger than in earlier calls.
        The result is valid until the next call."""
        if count > _RAMP_COUNT:
            return np.arange(first, first + count, dtype=np.uint64).data.cast("B").cast("Q")
        at = first - self._ramp_first
        if at + count > _RAMP_COUNT:
            self._ramp += np.uint64(at)  # the ramp starts at ``first`` now
            at, self._ramp_first = 0, first
        return self._ramp_view[at : at + count]

    def sequences_of(self, pages: Pages) -> Numbers:
        """The sequences of ``pages`` as they are now."""
        return self._sequences.of(pages)

    # Moves, named as in the drawing above; for pages in another state they raise ``LedgerError``

    def take(self, count: int) -> Grant:
        """Hold ``count`` free pages, ascending. Raises ``LedgerError`` if fewer are free."""
        if count > self.free:
            raise LedgerError(f"{count} pages taken of {self.free} free")
        pages = self._free.pop(count)
        self._move(pages, _FREE, _HELD)
        self.free -= count
        self.held += count
        return pages, self._count_up(self._sequences, pages)

    def give(self, pages: Pages) -> None:
        """Held pages become free."""
        count = len(pages)
        if count:
            self._move(pages, _HELD, _FREE)
            self.held -= count
            self.free += count
            self._free.push(pages)

    def commit(self, pages: Pages) -> int:
        """Held pages become committed and pinned, with consecutive identities that are larger than
        any before, so a parent's identity is always smaller. Returns the first identity."""
        count = len(pages)
        self._move(pages, _HELD, _COMMITTED)
        self.held -= count
        self.pinned += count
        return self._count_up(self._identities, pages).start

    def pin(self, count: int) -> None:
        """``count`` idle pages become referenced."""
        self.idle -= count
        self.pinned += count

    def unpin(self, count: int) -> None:
        """``count`` pinned pages are not referenced any more."""
        self.pinned -= count
        self.idle += count

    def evict(self, pages: Pages) -> None:
        """Idle committed pages become free."""
        count = len(pages)
        self._move(pages, _COMMITTED, _FREE)
        self.idle -= count
        self.free += count
        self.evicted += count
        self._free.push(pages)

    def reuse(self, pages: Pages) -> Run:
        """Evict idle committed pages and take them in one step: they become held under new
        sequences, which are returned."""
        self._move(pages, _COMMITTED, _HELD)
        count = len(pages)
        self.idle -= count
        self.held += count
        self.evicted += count
        return self.renumber(pages)

    def drain(self, pages: Pages) -> None:
        """Held pages wait for their writer to let go."""
        self._move(pages, _HELD, _DRAINING)
        self.held -= len(pages)
        self.draining += len(pages)

    def strand(self, pages: Pages) -> None:
        """Idle committed pages drain: a worker that has not declared yet may still read them."""
        count = len(pages)
        self._move(pages, _COMMITTED, _DRAINING)
        self.idle -= count
        self.draining += count

    def settle(self, pages: Pages) -> None:
        """Draining pages that no worker uses any more become free."""
        count = len(pages)
        self._move(pages, _DRAINING, _FREE)
        self.draining -= count
        self.free += count
        self._free.push(pages)

    def resume(self, pages: Pages) -> None:
        """Draining pages become held again: their writer declared them."""
        self._move(pages, _DRAINING, _HELD)
        self.draining -= len(pages)
        self.held += len(pages)

    def adopt(self, states: NDArray[np.uint8]) -> None:
        """Take over page states from an earlier pager life: FREE, COMMITTED (idle) or DRAINING."""
        self._view[:] = states
        counts = np.bincount(states, minlength=5)
        self.free, self.idle = int(counts[_FREE]), int(counts[_COMMITTED])
        self.draining, self.held, self.pinned = int(counts[_DRAINING]), 0, 0
        self._free.reset(np.flatnonzero(states == _FREE).astype("<u4"))
        self.check()

    def tidy(self) -> None:
        """Sort free pages, so that the next grants are contiguous."""
        self._free.tidy()

    def check(self) -> None:
        """Raise ``LedgerError`` unless states, counts and the free pages agree."""
        counts = np.bincount(self._view, minlength=5)
        known = (self.free, self.held, self.pinned + self.idle, self.draining)
        found = tuple(int(counts[state]) for state in (_FREE, _HELD, _COMMITTED, _DRAINING))
        if known != found or sum(known) != self.total or min(self.pinned, self.idle) < 0:
            raise LedgerError(f"counts {known} of {self.total}, states say {found}")
        if self.free != self._free.count:
            raise LedgerError(f"{self.free} pages are free, {self._free.count} are to be had")
        stacked = np.zeros(self.total, bool)
        stacked[self._free.table()] = True
        if not np.array_equal(stacked, self._view == _FREE):
            raise LedgerError("the free pages are not those whose state says so")

    def _move(self, pages: Pages, source: int, target: int) -> None:
        count = len(pages)
        if isinstance(pages, Run):
            first, stop = pages.start, pages.stop
            if count == 1 and first < self.total and self._states[first] == source:
                self._states[first] = target
                return
            # A single comparison of bytes makes this check affordable.
            if self._states[first:stop] != _AS_BYTE[source] * count:
                raise self._not_all(pages, source)
            self._states[first:stop] = _AS_BYTE[target] * count
            return
        index = where(pages)
        if self._view[index].tobytes().count(source) != count:
            raise self._not_all(pages, source)
        self._view[index] = target

    def _not_all(self, pages: Pages, source: int) -> LedgerError:
        some = part(pages, 0, min(len(pages), _TOLD_MAX))
        found = [self._states[page] for page in some if page < self.total]
        return LedgerError(f"pages {some} are {found!r}, not all {source}")
