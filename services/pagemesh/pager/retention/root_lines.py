"""Lines of the pool's root table: which are free, and which pages of an earlier life may be of.

    free --planted--> a tree's --uprooted, and no page of an earlier life names it--> free
                               `--uprooted before all pages were accounted for------> kept
    kept --everybody of the earlier life has declared or died, and no such page is left--> free

A header names the line that its page was written under. No line is given to another tree while a
page of an earlier life may be declared that names it, or found in the pool by the next pager. So
headers tell what was invalidated from what was computed since, in this life and in all later ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.events import HeaderTable
from pagemesh.wire.pool_format import ROOT_COUNT_MAX, HeaderState
from pagemesh.wire.tokens import U32

_UNTOLD = np.uint32(0xFFFF_FFFF)
"""The line of a free page, or of one whose header was torn."""


class RootLines:
    """All lines that no tree has."""

    def __init__(self) -> None:
        self.free = list(range(ROOT_COUNT_MAX - 1, -1, -1))
        self.kept: list[int] = []
        self._of_pages: U32 | None = None  # when this life began; None: all are accounted for
        self._named: frozenset[int] = frozenset()

    def adopt(self, headers: HeaderTable) -> None:
        """Keep those of ``free`` that ``headers`` name: no tree has them any more."""
        whole = (headers.states != HeaderState.FREE) & (headers.states != HeaderState.INVALID)
        self._of_pages = np.where(whole, headers.roots, _UNTOLD)
        self._named = frozenset(np.unique(headers.roots[whole]).tolist())
        self.kept = [index for index in self.free if index in self._named]
        self.free = [index for index in self.free if index not in self._named]

    def is_named(self, index: int) -> bool:
        """Whether a page that is not accounted for may be of the line."""
        return index in self._named

    def are_of(self, index: int, pages: NDArray[np.uint32]) -> bool:
        """Whether headers of ``pages`` of an earlier life name this line, and no other: at least
        one does, whatever was torn."""
        assert self._of_pages is not None, "everybody has declared"
        lines = self._of_pages[pages]
        told = lines[lines != _UNTOLD]
        return bool(len(told)) and bool((told == index).all())

    def give(self, index: int) -> None:
        """A tree does not have the line any more."""
        (self.kept if self.is_named(index) else self.free).append(index)

    def settle(self, left: U32) -> None:
        """Every page of an earlier life is accounted for, but those ``left``."""
        if self._of_pages is None:
            return
        self._named = frozenset(self._of_pages[left].tolist())
        self.free += [index for index in self.kept if index not in self._named]
        self.kept = [index for index in self.kept if index in self._named]
        if not len(left):
            self._of_pages = None
