"""Lists of pages. One contiguous run is a ``Run``, anything else a uint32 array.

Most grants are one run, and a run costs the same whatever its length: cutting, joining and packing
it take a few integer operations, and it selects a slice of the ledger's arrays. An array costs one
vectorised operation. Neither needs a Python step per page.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from pagemesh.wire.tokens import EMPTY, U32, pack_extents

_EXTENT: Final = struct.Struct("<II")


@final
class Run:
    """Consecutive numbers from ``start`` up to, but not including, ``stop``: pages, or their ledger
    numbers. ``part`` slices it. Like a ``range``, but in compiled code its ends are plain
    integers, read without an attribute look-up."""

    __slots__ = ("start", "stop")

    def __init__(self, start: int, stop: int) -> None:
        self.start: Final = start
        self.stop: Final = stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __getitem__(self, at: int) -> int:
        number = at + (self.start if at >= 0 else self.stop)
        if not self.start <= number < self.stop:
            raise IndexError(f"no place {at} in {self}")
        return number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and (self.start, self.stop) == (other.start, other.stop)

    def __hash__(self) -> int:
        return hash((self.start, self.stop))

    def __repr__(self) -> str:
        return f"Run({self.start}, {self.stop})"


Pages = Run | U32
NO_PAGES: Final = Run(0, 0)


def where(pages: Pages) -> slice | NDArray[np.intp]:
    """The index of ``pages`` into an array that has an entry for each page of the pool."""
    if isinstance(pages, Run):
        return slice(pages.start, pages.stop)
    return table_of(pages).astype(np.intp)  # numpy indexes with it four times as fast


def table_of(pages: Pages) -> U32:
    """``pages`` as an array, uint32 [pages]."""
    if isinstance(pages, Run):
        return np.arange(pages.start, pages.stop, dtype="<u4")
    return pages


def run_of(table: U32) -> Pages:
    """``table`` as a run if it is contiguous; it must be ascending, without repeats."""
    count = len(table)
    if not count:
        return NO_PAGES
    first = int(table[0])
    return Run(first, first + count) if int(table[-1]) - first == count - 1 else table


def as_run(pages: Pages) -> Pages:
    """``pages`` as a run if they are contiguous."""
    if isinstance(pages, Run):
        return pages
    table = table_of(pages)
    if not len(table) or int(table[-1]) - int(table[0]) != len(table) - 1:
        return table
    return run_of(table) if (table[1:] - table[:-1] == 1).all() else table


def own(pages: Pages) -> Pages:
    """``pages`` in a form to keep: a slice would keep the whole array alive, so it is copied."""
    return pages if isinstance(pages, Run) else pages.copy()


def part(pages: Pages, start: int, stop: int) -> Pages:
    """``pages[start:stop]``, where ``0 <= start <= stop <= len(pages)``."""
    if isinstance(pages, Run):
        return Run(pages.start + start, pages.start + stop)
    return pages[start:stop]


def first_of(pages: Pages) -> int:
    """The first of ``pages``, which must not be empty."""
    return pages.start if isinstance(pages, Run) else int(pages[0])


def last_of(pages: Pages) -> int:
    """The last of ``pages``, which must not be empty."""
    return pages.stop - 1 if isinstance(pages, Run) else int(pages[-1])


def last(pages: Pages) -> Pages:
    """The last of ``pages`` as a list of one, or an empty list."""
    if not isinstance(pages, Run):
        return pages[-1:]
    stop = pages.stop
    return Run(stop - 1, stop) if stop > pages.start else pages


def follows(left: Pages, right: Pages) -> bool:
    """Whether ``left`` and ``right`` are runs that together form one run."""
    return isinstance(left, Run) and isinstance(right, Run) and left.stop == right.start


def join(left: Pages, right: Pages) -> Pages:
    """``left``, then ``right``."""
    if not len(left):
        return right
    if not len(right):
        return left
    if isinstance(left, Run) and isinstance(right, Run) and left.stop == right.start:
        return Run(left.start, right.stop)
    return np.concatenate([table_of(left), table_of(right)])


def join_all(parts: Iterable[Pages]) -> U32:
    """All of ``parts`` as one array, uint32 [pages]."""
    tables = [table_of(piece) for piece in parts]
    return np.concatenate(tables) if tables else EMPTY


def pack_runs(parts: list[Pages]) -> bytes:
    """The concatenated ``parts`` as packed extents (see ``wire.tokens``); adjacent runs become one
    extent."""
    packed: list[bytes] = []
    start = stop = 0
    for piece in parts:
        if isinstance(piece, Run):
            if piece.start != stop:
                if stop > start:
                    packed.append(_EXTENT.pack(start, stop - start))
                start = piece.start
            stop = piece.stop
        else:
            if stop > start:
                packed.append(_EXTENT.pack(start, stop - start))
            packed.append(pack_extents(table_of(piece)))
            start = stop = 0
    if stop > start:
        packed.append(_EXTENT.pack(start, stop - start))
    return packed[0] if len(packed) == 1 else b"".join(packed)


def join_extents(left: bytes, right: bytes) -> bytes:
    """The concatenation of two packed page tables."""
    if left and right:
        first, count = _EXTENT.unpack_from(left, len(left) - 8)
        start, more = _EXTENT.unpack_from(right)
        if first + count == start:
            return left[:-8] + _EXTENT.pack(first, count + more) + right[8:]
    return left + right


def last_extents(extents: bytes, page_count: int) -> bytes:
    """The last ``page_count`` pages of a packed page table, which must have that many."""
    at = len(extents)
    while page_count > 0:
        at -= 8
        first, count = _EXTENT.unpack_from(extents, at)
        if count > page_count:
            cut = _EXTENT.pack(first + count - page_count, page_count)
            return cut + extents[at + 8 :]
        page_count -= count
    return extents[at:]
