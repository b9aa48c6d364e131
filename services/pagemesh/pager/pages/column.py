"""A ledger number for each page of a pool."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.pages.runs import Pages, Run, where

U64Array = NDArray[np.uint64]
Numbers: TypeAlias = "Run | array[int] | U64Array"
"""One a page: a run where they count up."""


class Column:
    """At first 0 for each of ``page_count`` pages.

    The same memory twice: runs go in and out as slices of an array of Python's own, in half the
    time that numpy takes for it; ``numbers`` is for anything else.
    """

    __slots__ = ("_array", "numbers")

    def __init__(self, page_count: int) -> None:
        self._array = array("Q", [0]) * page_count
        self.numbers: U64Array = np.frombuffer(self._array, np.uint64)

    def one(self, page: int) -> int:
        """The number of ``page``."""
        number: int = self._array[page]
        return number

    def put(self, pages: Pages, numbers: array[int]) -> None:
        """``pages`` have ``numbers`` now, one each."""
        if isinstance(pages, Run):
            self._array[pages.start : pages.stop] = numbers
        else:
            self.numbers[where(pages)] = np.frombuffer(numbers, np.uint64)

    def put_one(self, page: int, number: int) -> None:
        """``page`` has ``number`` now."""
        self._array[page] = number

    def of(self, pages: Pages) -> Numbers:
        """The numbers of ``pages`` as they are now."""
        if not isinstance(pages, Run):
            return self.numbers[where(pages)]  # picking makes a copy
        start, stop = pages.start, pages.stop
        if stop - start == 1:
            number = self.one(start)
            return Run(number, number + 1)
        return self._array[start:stop]
