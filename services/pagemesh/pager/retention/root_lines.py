"""Lines of the pool's root table: which are free, and which pages of an earlier pager life name.

    free --planted--> a tree's --uprooted, and no page of an earlier life names it--> free
                               `--uprooted before all pages were accounted for------> kept
    kept --every worker of the earlier life has declared or died, no such page left--> free

A page's header names the line of the tree for which it was written. No line is given to another
tree while a page of an earlier life that names it may be declared, or found in the pool by the next
pager. So headers distinguish pages that were invalidated from pages computed since, in this pager
life and in all later ones.
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
    """The lines that no tree has: ``free`` ones, and those ``kept`` from reuse for now."""

    def __init__(self) -> None:
        self.free = list(range(ROOT_COUNT_MAX - 1, -1, -1))
        self.kept: list[int] = []
        self._of_pages: U32 | None = None  # as this life began; None: all pages accounted for
        self._named: frozenset[int] = frozenset()

    def adopt(self, headers: HeaderTable) -> None:
        """Keep the lines in ``free`` that ``headers`` still name, though no tree has them."""
        whole = (headers.states != HeaderState.FREE) & (headers.states != HeaderState.INVALID)
        self._of_pages = np.where(whole, headers.roots, _UNTOLD)
        self._named = frozenset(np.unique(headers.roots[whole]).tolist())
        self.kept = [index for index in self.free if index in self._named]
        self.free = [index for index in self.free if index not in self._named]

    def is_named(self, index: int) -> bool:
        """Whether a page that is not accounted for yet may name the line."""
        return index in self._named

    def are_of(self, index: int, pages: NDArray[np.uint32]) -> bool:
        """Whether the headers of ``pages``, from an earlier life, name this line and no other.
        Torn headers are ignored, but at least one must name it."""
        assert self._of_pages is not None, "everybody has declared"
        lines = self._of_pages[pages]
        told = lines[lines != _UNTOLD]
        return bool(len(told)) and bool((told == index).all())

    def give(self, index: int) -> None:
        """A tree gives its line back."""
        (self.kept if self.is_named(index) else self.free).append(index)

    def settle(self, left: U32) -> None:
        """Every page of an earlier life is accounted for, except those ``left``."""
        if self._of_pages is None:
            return
        self._named = frozenset(self._of_pages[left].tolist())
        self.free += [index for index in self.kept if index not in self._named]
        self.kept = [index for index in self.kept if index in self._named]
        if not len(left):
            self._of_pages = None
