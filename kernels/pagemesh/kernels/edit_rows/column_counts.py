"""The distinct columns of a growing list, and how often each occurs in it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
_ROOM = 64
"""Columns there is room for at first."""


class ColumnCounts:
    """``columns`` uint32 [size], distinct, in any order; ``counts`` float32 [size]. Adding a column
    costs the same however many there are."""

    __slots__ = ("_columns", "_counts", "_places", "columns_at", "counts_at", "end", "size")

    def __init__(self) -> None:
        self.size = 0
        self.end = 0
        """All columns are below it."""
        self._places: dict[int, int] = {}
        self._make_room(_ROOM)

    @property
    def columns(self) -> U32:
        return self._columns[: self.size]

    @property
    def counts(self) -> F32:
        return self._counts[: self.size]

    def count_anew(self, columns: U32) -> None:
        """Start over with this list."""
        own, counts = np.unique(columns, return_counts=True)
        self.size = len(own)
        self._make_room(2 * self.size + _ROOM)
        self._columns[: self.size], self._counts[: self.size] = own, counts
        self._places = dict(zip(own.tolist(), range(self.size), strict=True))
        self.end = int(own[-1]) + 1 if self.size else 0

    def add(self, column: int) -> None:
        """Append ``column`` to the list."""
        place = self._places.get(column)
        if place is not None:
            self._counts[place] += np.float32(1.0)
            return
        if self.size == len(self._columns):
            columns, counts = self.columns, self.counts
            self._make_room(2 * self.size)
            self._columns[: self.size], self._counts[: self.size] = columns, counts
        self._places[column] = self.size
        self._columns[self.size], self._counts[self.size] = column, 1.0
        self.size += 1
        self.end = max(self.end, column + 1)

    def _make_room(self, room: int) -> None:
        self._columns: U32 = np.empty(room, np.uint32)
        self._counts: F32 = np.empty(room, np.float32)
        self.columns_at: int = self._columns.ctypes.data
        """The address from which the native library reads the columns."""
        self.counts_at: int = self._counts.ctypes.data
