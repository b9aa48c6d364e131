"""Lists of pages. One contiguous run is a ``range``, anything else a uint32 array.

Grants are mostly one run, and a run costs the same whatever its length: cutting, joining and
packing it are a few integers, and the ledger's arrays take it as a slice. An array costs one
vectorised operation. Neither costs a step of Python a page.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pagemesh.wire.tokens import EMPTY, U32, pack_extents

Pages = range | U32
NO_PAGES: Pages = range(0)
_EXTENT = struct.Struct("<II")


def where(pages: Pages) -> slice | NDArray[np.intp]:
    """What picks ``pages`` out of an array with an entry for each page of the pool."""
    if type(pages) is range:
        return slice(pages.start, pages.stop)
    return table_of(pages).astype(np.intp)  # numpy takes it four times as quickly as uint32


def table_of(pages: Pages) -> U32:
    """``pages`` one by one."""
    if isinstance(pages, range):
        return np.arange(pages.start, pages.stop, dtype="<u4")
    return pages


def run_of(table: U32) -> Pages:
    """``table`` as a run, if it is one; it must be ascending, without repeats."""
    count = len(table)
    if not count:
        return NO_PAGES
    first = int(table[0])
    return range(first, first + count) if int(table[-1]) - first == count - 1 else table


def as_run(pages: Pages) -> Pages:
    """``pages`` as a run, if they are one."""
    if type(pages) is range:
        return pages
    table = table_of(pages)
    if not len(table) or int(table[-1]) - int(table[0]) != len(table) - 1:
        return table
    return run_of(table) if (table[1:] - table[:-1] == 1).all() else table


def own(pages: Pages) -> Pages:
    """``pages`` as something to keep: a part of an array would keep all of it alive."""
    return pages if type(pages) is range else table_of(pages).copy()


def follows(left: Pages, right: Pages) -> bool:
    """Whether ``left`` and ``right`` are runs that are one run together."""
    return type(left) is range and type(right) is range and left.stop == right.start


def join(left: Pages, right: Pages) -> Pages:
    """``left``, then ``right``."""
    if not len(left):
        return right
    if not len(right):
        return left
    if type(left) is range and type(right) is range and left.stop == right.start:
        return range(left.start, right.stop)
    return np.concatenate([table_of(left), table_of(right)])


def join_all(parts: Iterable[Pages]) -> U32:
    """All of ``parts``, one by one."""
    tables = [table_of(part) for part in parts]
    return np.concatenate(tables) if tables else EMPTY


def pack_runs(parts: Iterable[Pages]) -> bytes:
    """``parts``, one after the other, as packed extents (see ``wire.tokens``); runs that
    follow each other become one extent."""
    packed: list[bytes] = []
    start = stop = 0
    for part in parts:
        if type(part) is range:
            if part.start == stop:
                stop = part.stop
                continue
            if stop > start:
                packed.append(_EXTENT.pack(start, stop - start))
            start, stop = part.start, part.stop
        else:
            if stop > start:
                packed.append(_EXTENT.pack(start, stop - start))
            packed.append(pack_extents(table_of(part)))
            start = stop = 0
    if stop > start:
        packed.append(_EXTENT.pack(start, stop - start))
    return packed[0] if len(packed) == 1 else b"".join(packed)


def join_extents(left: bytes, right: bytes) -> bytes:
    """Two packed tables, one after the other."""
    if left and right:
        first, count = _EXTENT.unpack_from(left, len(left) - 8)
        start, more = _EXTENT.unpack_from(right)
        if first + count == start:
            return left[:-8] + _EXTENT.pack(first, count + more) + right[8:]
    return left + right


def last_extents(extents: bytes, page_count: int) -> bytes:
    """The last ``page_count`` pages of a packed table that has so many."""
    at = len(extents)
    while page_count > 0:
        at -= 8
        first, count = _EXTENT.unpack_from(extents, at)
        if count > page_count:
            cut = _EXTENT.pack(first + count - page_count, page_count)
            return cut + extents[at + 8 :]
        page_count -= count
    return extents[at:]
