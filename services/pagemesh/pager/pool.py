"""The ledger of a pool: what state each page is in, and which pages are free.

         take                commit                      evict
    FREE -----> HELD --------------------> COMMITTED ------------+
     ^           |  ^                      pinned <-> idle       |
     |           |  | resume                  pin / unpin        |
     |   drain   v  |                                            |
     +------- DRAINING                                           |
     |  settle                                                   |
     +--- free (from HELD) <-------------------------------------+

At every moment ``free + held + pinned + idle + draining = total``. Whether a committed page
is pinned is known to the prefix tree, which reports changes by count.

Free pages lie on a stack. Pages that come back together lie together, and what is taken
together is sorted, so that most grants are one contiguous run without searching for one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagemesh.wire.pool_format import HeaderState
from pagemesh.wire.tokens import U32

_U64 = NDArray[np.uint64]
_TIDY_PAGES_MAX = 1 << 14

_FREE = int(HeaderState.FREE)
_HELD = int(HeaderState.HELD)
_COMMITTED = int(HeaderState.COMMITTED)
_DRAINING = int(HeaderState.DRAINING)


class LedgerError(AssertionError):
    """A page was moved from a state it is not in: a bug in the pager."""


class PagePool:
    """Page states, reuse sequences and identities of ``page_count`` pages.

    Ledger numbers start above ``first_sequence`` and only grow. A page has two: the
    *sequence* of its last grant (the fence) and, once committed, its *identity*.
    """

    __slots__ = (
        "_disordered",
        "_stack",
        "_states",
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
        self.total = page_count
        self.free = page_count
        self.held = self.pinned = self.idle = self.draining = 0
        self.evicted = 0
        self.last_sequence = first_sequence
        self.sequences: _U64 = np.zeros(page_count, np.uint64)
        self.identities: _U64 = np.zeros(page_count, np.uint64)
        self._states: NDArray[np.uint8] = np.zeros(page_count, np.uint8)
        # The top of the stack is its end: low pages go out first from a fresh pool.
        self._stack: U32 = np.arange(page_count, dtype="<u4")[::-1].copy()
        self._disordered = False

    @property
    def states(self) -> NDArray[np.uint8]:
        """``HeaderState`` of each page, as a read-only view."""
        view = self._states.view()
        view.setflags(write=False)
        return view

    def number(self, count: int = 1) -> int:
        """Reserve ``count`` ledger numbers and return the first of them."""
        first = self.last_sequence + 1
        self.last_sequence += count
        return first

    def renumber(self, pages: U32) -> None:
        """Give ``pages`` new, larger sequences: whoever had them is fenced off."""
        first = self.number(len(pages))
        self.sequences[pages] = np.arange(first, first + len(pages), dtype=np.uint64)

    def identify(self, pages: U32) -> None:
        """Give ``pages`` identities, each larger than any before (so parents' are smaller)."""
        first = self.number(len(pages))
        self.identities[pages] = np.arange(first, first + len(pages), dtype=np.uint64)

    # Moves of pages, named as in the drawing above

    def take(self, count: int) -> U32:
        """``count`` free pages, ascending, now held under new sequences."""
        if count > self.free:
            raise LedgerError(f"{count} pages taken of {self.free} free")
        self.free -= count
        pages = self._stack[self.free : self.free + count].copy()
        pages.sort()
        self._move(pages, _FREE, _HELD)
        self.held += count
        self.renumber(pages)
        return pages

    def give(self, pages: U32) -> None:
        """Held pages become free."""
        self._move(pages, _HELD, _FREE)
        self.held -= len(pages)
        self._push(pages)

    def commit(self, pages: U32) -> None:
        """Held pages become committed, pinned and identified."""
        self._move(pages, _HELD, _COMMITTED)
        self.held -= len(pages)
        self.pinned += len(pages)
        self.identify(pages)

    def pin(self, count: int) -> None:
        """``count`` idle pages are now referenced."""
        self.idle -= count
        self.pinned += count

    def unpin(self, count: int) -> None:
        """``count`` pinned pages are not referenced any more."""
        self.pinned -= count
        self.idle += count

    def evict(self, pages: U32) -> None:
        """Idle committed pages become free."""
        self._move(pages, _COMMITTED, _FREE)
        self.idle -= len(pages)
        self.evicted += len(pages)
        self._push(pages)

    def drain(self, pages: U32) -> None:
        """Held pages wait for their writer to let go."""
        self._move(pages, _HELD, _DRAINING)
        self.held -= len(pages)
        self.draining += len(pages)

    def settle(self, pages: U32) -> None:
        """Draining pages, their writer gone from them, become free."""
        self._move(pages, _DRAINING, _FREE)
        self.draining -= len(pages)
        self._push(pages)

    def resume(self, pages: U32) -> None:
        """Draining pages turn out to be held (their writer declared them)."""
        self._move(pages, _DRAINING, _HELD)
        self.draining -= len(pages)
        self.held += len(pages)

    def adopt(self, states: NDArray[np.uint8]) -> None:
        """Take over the states of an earlier life: FREE, COMMITTED (idle) or DRAINING pages."""
        self._states[:] = states
        counts = np.bincount(states, minlength=5)
        self.free, self.idle = int(counts[_FREE]), int(counts[_COMMITTED])
        self.draining, self.held, self.pinned = int(counts[_DRAINING]), 0, 0
        self._stack[: self.free] = np.flatnonzero(states == _FREE)[::-1]
        self.check()

    def tidy(self) -> None:
        """Sort the top of the free stack, so that what goes out next is contiguous."""
        if self._disordered:
            top = self._stack[max(0, self.free - _TIDY_PAGES_MAX) : self.free]
            top[:] = np.sort(top)[::-1]
            self._disordered = False

    def check(self) -> None:
        """Raise ``LedgerError`` unless states, counts and the free stack agree."""
        counts = np.bincount(self._states, minlength=5)
        known = (self.free, self.held, self.pinned + self.idle, self.draining)
        found = tuple(int(counts[state]) for state in (_FREE, _HELD, _COMMITTED, _DRAINING))
        if known != found or sum(known) != self.total or min(self.pinned, self.idle) < 0:
            raise LedgerError(f"counts {known} of {self.total}, states say {found}")
        stacked = np.zeros(self.total, bool)
        stacked[self._stack[: self.free]] = True
        if not np.array_equal(stacked, self._states == _FREE):
            raise LedgerError("the free stack is not the set of free pages")

    def _push(self, pages: U32) -> None:
        self._stack[self.free : self.free + len(pages)] = pages[::-1]
        self.free += len(pages)
        self._disordered = True

    def _move(self, pages: U32, source: int, target: int) -> None:
        # Bytes are counted in one pass, which is what makes this check affordable.
        found = self._states[pages].tobytes()
        if found.count(source) != len(found):
            raise LedgerError(f"pages {pages[:8]} are {found[:8]!r}, not all {source}")
        self._states[pages] = target
