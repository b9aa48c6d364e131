"""The ledger of a pool: what state each page is in, and which pages are free.

         take                commit                      evict
    FREE -----> HELD --------------------> COMMITTED ------------+
     ^           ^ |  ^                    pinned <-> idle       |
     |           | |  | resume                pin / unpin        |
     |           | |  |         reuse                            |
     |           +-|--|------------------------------------------+
     |   drain     v  |                                          |
     +------- DRAINING                                           |
     |  settle                                                   |
     +--- free (from HELD) <-------------------------------------+

At every moment ``free + held + pinned + idle + draining = total``. Whether a committed page
is pinned is known to the prefix tree, which reports changes by count.

Most grants are one run of pages (see ``runs`` and ``free_pages``), which is moved, numbered and
checked as a slice: its length hardly matters.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.pages.free_pages import FreePages
from pagemesh.pager.pages.ledger_error import LedgerError
from pagemesh.pager.pages.runs import Pages, table_of, where
from pagemesh.wire.pool_format import HeaderState

_U64 = NDArray[np.uint64]

_FREE = int(HeaderState.FREE)
_HELD = int(HeaderState.HELD)
_COMMITTED = int(HeaderState.COMMITTED)
_DRAINING = int(HeaderState.DRAINING)
_BYTE_OF = [bytes([state]) for state in range(5)]
_RAMP_COUNT = 4_096


Grant = tuple[Pages, range]
"""Pages that are held now, and their new sequences."""


class PagePool:
    """Page states, reuse sequences and identities of ``page_count`` pages.

    Ledger numbers start above ``first_sequence`` and only grow. A page has two: the
    *sequence* of its last grant (the fence) and, once committed, its *identity*.
    """

    __slots__ = (
        "_free",
        "_ramp",
        "_ramp_first",
        "_states",
        "_view",
        "draining",
        "evicted",
        "free",
        "held",
        "identities",
        "idle",
        "last_sequence",
        "pinned",
        "sequences",
        "total",
    )

    def __init__(self, page_count: int, first_sequence: int) -> None:
        self.total = self.free = page_count
        self.held = self.pinned = self.idle = self.draining = 0
        self.evicted = 0
        self.last_sequence = first_sequence
        self.sequences: _U64 = np.zeros(page_count, np.uint64)
        self.identities: _U64 = np.zeros(page_count, np.uint64)
        # The same bytes twice: runs are counted and set as bytes, other lists through numpy.
        self._states = bytearray(page_count)
        self._view: NDArray[np.uint8] = np.frombuffer(self._states, np.uint8)
        self._free = FreePages(page_count)
        # Numbers that are likely to be given out next: copying some is cheaper than making them.
        self._ramp_first = 0
        self._ramp: _U64 = np.arange(_RAMP_COUNT, dtype=np.uint64)

    @property
    def states(self) -> NDArray[np.uint8]:
        """``HeaderState`` of each page, as a read-only view."""
        view = self._view.view()
        view.setflags(write=False)
        return view

    def number(self, count: int = 1) -> int:
        """Reserve ``count`` ledger numbers and return the first of them."""
        first = self.last_sequence + 1
        self.last_sequence += count
        return first

    def renumber(self, pages: Pages) -> range:
        """Give ``pages`` new, larger sequences, one after the other, and return these: whoever
        had the pages is fenced off."""
        return self._count_up(self.sequences, pages)

    def _count_up(self, column: _U64, pages: Pages) -> range:
        count = len(pages)
        first = self.last_sequence + 1
        self.last_sequence += count
        stop = first + count
        if count == 1:
            column[pages[0]] = first
        else:
            at = first - self._ramp_first
            if at + count > _RAMP_COUNT:
                self._ramp += at  # it starts at ``first`` now; in place it stays in the cache
                at, self._ramp_first = 0, first
            numbers = self._ramp[at : at + count]
            if count > _RAMP_COUNT:
                numbers = np.arange(first, stop, dtype=np.uint64)
            if type(pages) is range:
                column[pages.start : pages.stop] = numbers
            else:
                column[where(pages)] = numbers
        return range(first, stop)

    def sequences_of(self, pages: Pages) -> range | _U64:
        """The sequences of ``pages`` as they are now."""
        if len(pages) == 1:
            one = self.sequences.item(pages[0])
            return range(one, one + 1)
        if type(pages) is range:
            return self.sequences[pages.start : pages.stop].copy()
        return self.sequences[where(pages)]  # picking makes a copy

    # Moves of pages, named as in the drawing above

    def take(self, count: int) -> Grant:
        """``count`` free pages, ascending, now held."""
        if count > self.free:
            raise LedgerError(f"{count} pages taken of {self.free} free")
        pages = self._free.pop(count)
        self._move(pages, _FREE, _HELD)
        self.free -= count
        self.held += count
        return pages, self._count_up(self.sequences, pages)

    def give(self, pages: Pages) -> None:
        """Held pages become free."""
        count = len(pages)
        if count:
            self._move(pages, _HELD, _FREE)
            self.held -= count
            self.free += count
            self._free.push(pages)

    def commit(self, pages: Pages) -> int:
        """Held pages become committed, pinned and identified, one after the other: identities are
        larger than any before, so parents' are smaller. Returns the first."""
        count = len(pages)
        self._move(pages, _HELD, _COMMITTED)
        self.held -= count
        self.pinned += count
        return self._count_up(self.identities, pages).start

    def pin(self, count: int) -> None:
        """``count`` idle pages are now referenced."""
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

    def reuse(self, pages: Pages) -> range:
        """Idle committed pages are evicted and taken in one: held under new sequences, which
        are returned."""
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

    def settle(self, pages: Pages) -> None:
        """Draining pages, their writer gone from them, become free."""
        count = len(pages)
        self._move(pages, _DRAINING, _FREE)
        self.draining -= count
        self.free += count
        self._free.push(pages)

    def resume(self, pages: Pages) -> None:
        """Draining pages turn out to be held (their writer declared them)."""
        self._move(pages, _DRAINING, _HELD)
        self.draining -= len(pages)
        self.held += len(pages)

    def adopt(self, states: NDArray[np.uint8]) -> None:
        """Take over the states of an earlier life: FREE, COMMITTED (idle) or DRAINING pages."""
        self._view[:] = states
        counts = np.bincount(states, minlength=5)
        self.free, self.idle = int(counts[_FREE]), int(counts[_COMMITTED])
        self.draining, self.held, self.pinned = int(counts[_DRAINING]), 0, 0
        self._free.reset(np.flatnonzero(states == _FREE).astype("<u4"))
        self.check()

    def tidy(self) -> None:
        """Put free pages in order, so that what goes out next is contiguous."""
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
        if type(pages) is range:
            first, stop = pages.start, pages.stop
            if count == 1 and self._states[first] == source:
                self._states[first] = target
                return
            # Bytes are counted in one pass, which is what makes this check affordable; pages
            # beyond the pool are none.
            if self._states.count(source, first, stop) != count:
                raise self._not_all(pages, source)
            self._states[first:stop] = _BYTE_OF[target] * count
            return
        index = where(pages)
        if self._view[index].tobytes().count(source) != count:
            raise self._not_all(pages, source)
        self._view[index] = target

    def _not_all(self, pages: Pages, source: int) -> LedgerError:
        found = self._view[table_of(pages)].tolist()
        return LedgerError(f"pages {pages[:8]} are {found[:8]!r}, not all {source}")
