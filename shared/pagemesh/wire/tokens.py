"""Packed integers: token ids and page tables travel as little-endian ``uint32`` bytes.

A list of 8,192 ids costs hundreds of microseconds to build and check; the same ids as
bytes cost one copy. Page tables travel as *extents*: contiguous runs
``(first_page, page_count)``, two words each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pagemesh.wire.errors import Malformed
from pagemesh.wire.messages import Count, Value

U32 = NDArray[np.uint32]
_WORD = np.dtype("<u4")
_EXTENT = struct.Struct("<II")
_PAGE_COUNT_MAX = 1 << 32
_FEW_PAGES = 32
_FEW_EXTENTS = 6
EMPTY: U32 = np.empty(0, _WORD)
EMPTY.setflags(write=False)


class PageCopy(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One page to be copied onto another."""

    source_page: Count
    target_page: Count


def pack(values: Iterable[int] | U32) -> bytes:
    """``values`` as little-endian uint32 bytes."""
    if isinstance(values, np.ndarray):
        return values.astype(_WORD, copy=False).tobytes()
    return np.fromiter(values, _WORD).tobytes()


def unpack(data: bytes) -> U32:
    """A read-only view of packed words. Raises ``Malformed`` unless they are whole."""
    if len(data) % 4:
        raise Malformed(f"packed words must be a multiple of 4 bytes, got {len(data)}")
    return np.frombuffer(data, _WORD)


def pack_extents(pages: U32 | Iterable[int]) -> bytes:
    """A page table as contiguous runs, packed."""
    table = pages if isinstance(pages, np.ndarray) else np.fromiter(pages, _WORD)
    count = len(table)
    if not count:
        return b""
    # Every answer of the pager carries a page table. Most are short and have few runs: there,
    # numpy's cost per call exceeds that of going through a list.
    if count <= _FEW_PAGES:
        return _pack_few(table.tolist())
    cuts = (table[1:] - table[:-1] != 1).nonzero()[0] + 1
    if not len(cuts):
        return _EXTENT.pack(int(table[0]), count)
    runs = np.empty((len(cuts) + 1, 2), _WORD)
    runs[0, 0], runs[1:, 0] = table[0], table[cuts]
    runs[0, 1], runs[1:-1, 1], runs[-1, 1] = cuts[0], cuts[1:] - cuts[:-1], count - cuts[-1]
    return runs.tobytes()


def _pack_few(pages: list[int]) -> bytes:
    words: list[int] = []
    first = stop = pages[0]
    for page in pages:
        if page != stop:
            words += (first, stop - first)
            first = page
        stop = page + 1
    words += (first, stop - first)
    return struct.pack(f"<{len(words)}I", *words)


def unpack_extents(data: bytes, *, page_count_max: int) -> U32:
    """The page table that ``pack_extents`` packed.

    Raises ``Malformed`` when runs are broken or hold more than ``page_count_max`` pages in
    all, before anything of that size is allocated.
    """
    words = unpack(data)
    if len(words) % 2:
        raise Malformed("extents must be pairs of words")
    if len(words) <= 2 * _FEW_EXTENTS:
        return _unpack_few(words.tolist(), page_count_max)
    counts = words[1::2].astype(np.int64)
    _check_total(int(counts.sum()), int(counts.min()), page_count_max)
    starts = words[0::2].astype(np.int64)
    _check_last(int((starts + counts).max()))
    firsts = np.repeat(starts, counts)
    offsets = np.arange(len(firsts)) - np.repeat(np.cumsum(counts) - counts, counts)
    return (firsts + offsets).astype(_WORD)


def _unpack_few(words: list[int], page_count_max: int) -> U32:
    """The same for few extents, without numpy's cost of a dozen calls."""
    counts = words[1::2]
    _check_total(sum(counts), min(counts, default=1), page_count_max)
    table = np.empty(sum(counts), _WORD)
    at = 0
    for start, count in zip(words[0::2], counts, strict=True):
        _check_last(start + count)
        table[at : at + count] = np.arange(count) + start
        at += count
    return table


def _check_total(total: int, least: int, page_count_max: int) -> None:
    if total > page_count_max or not least:
        raise Malformed(f"extents name {total} pages, at most {page_count_max} are allowed")


def _check_last(end: int) -> None:
    if end > _PAGE_COUNT_MAX:
        raise Malformed("an extent runs past the largest possible page number")
