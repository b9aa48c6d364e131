"""A ledger number for each page of a pool."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.pages.runs import Pages, Run, where

U64Array = NDArray[np.uint64]
Numbers: TypeAlias = "Run | bytes"
"""One number per page: a run if they count up, else packed as 64-bit integers."""


class Column:
    """A number for each of ``page_count`` pages, 0 at first. Zeros take no memory until they are
    written to.

    The same memory is accessed in two ways: runs are written as slices of a memoryview, in a third
    of the time that numpy takes; ``numbers`` is for everything else.
    """

    __slots__ = ("_view", "numbers")

    def __init__(self, page_count: int) -> None:
        self.numbers: U64Array = np.zeros(page_count, np.uint64)
        self._view = self.numbers.data.cast("B").cast("Q")

    def one(self, page: int) -> int:
        """The number of ``page``."""
        number: int = self._view[page]
        return number

    def put(self, pages: Pages, numbers: memoryview) -> None:
        """Set ``pages`` to ``numbers``: one for each page, of 8 bytes."""
        if isinstance(pages, Run):
            self._view[pages.start : pages.stop] = numbers
        else:
            self.numbers[where(pages)] = np.frombuffer(numbers, np.uint64)

    def put_one(self, page: int, number: int) -> None:
        """Set ``page`` to ``number``."""
        self._view[page] = number

    def of(self, pages: Pages) -> Numbers:
        """The numbers of ``pages`` as they are now."""
        if not isinstance(pages, Run):
            return self.numbers[where(pages)].tobytes()
        start, stop = pages.start, pages.stop
        if stop - start == 1:
            number = self.one(start)
            return Run(number, number + 1)
        return self._view[start:stop].tobytes()
