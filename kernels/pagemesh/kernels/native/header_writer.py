"""How the pager writes headers: for whole lists of pages at once, at the speed of memory.

A grant or a commit gives all its pages the same state, writer and root, and consecutive ledger
sequences. So a call takes the pages as a run or as extents and the rest as single values, and the
native library makes each header in place; nothing is laid out in Python first.
"""

from __future__ import annotations

import struct
from typing import Protocol, TypeAlias

from pagemesh.kernels.native.headers import HeaderTable, address_of
from pagemesh.kernels.native.library import library
from pagemesh.wire.pool_format import HeaderState


class Counting(Protocol):
    """Consecutive numbers from ``start`` to ``stop`` (exclusive): a ``range``, or the like."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    def __len__(self) -> int: ...


PageList: TypeAlias = "Counting | bytes"
"""One run, as most lists are, or packed extents: pairs (first page, page count) of uint32."""
SequenceList: TypeAlias = "Counting | bytes"
"""One ledger sequence per page: consecutive ones, or packed as 64-bit numbers."""
_PAGES_MAX = 0xFFFF_FFFF
_RUN = struct.Struct("<QqqQQQQQQqQII")  # PmHeaderRun of pagemesh_native.h


class HeaderWriter:
    """Writes into ``table``. Only the pager may."""

    def __init__(self, table: HeaderTable) -> None:
        form = table.form
        self._mapped = table.mapped  # keeps the map for as long as its address is used
        address = address_of(table.mapped) + form.headers_offset
        self._place = (address, form.header_words, form.page_count)
        native = library()
        self._write, self._mark = native.pm_headers_write, native.pm_headers_mark
        self._keep = native.pm_headers_keep

    def write(
        self, pages: PageList, state: HeaderState, sequences: SequenceList, *, writer: int,
        root: int, first_identity: int = 0, parent: int = 0, tokens: bytes = b"",
        until_ms: int = 0,
    ) -> None:  # fmt: skip
        """Write whole headers. Identities count up from ``first_identity`` (0: none); each page's
        parent is the one before it, that of the first is ``parent``; ``tokens`` are packed, equally
        many for each page; all pages are kept until ``until_ms`` (0: no end). Raises ``IndexError``
        for pages that are not in the pool, ``ValueError`` when tokens or sequences do not fit the
        pages; then nothing is written."""
        page, count, extents = _page_list(pages)
        first, listed = _numbers(sequences, count)
        token_count = 0
        if tokens:
            token_count, odd = divmod(len(tokens), 4 * count) if count else (0, 1)
            if odd:
                raise ValueError(f"{len(tokens)} bytes are not as many tokens for {count} pages")
        run = _RUN.pack(
            *self._place, state, first, first_identity, parent, writer, root, token_count,
            until_ms, page, count,
        )  # fmt: skip
        bad = self._write(run, extents, len(extents or b"") // 8, listed, tokens)
        if bad:
            self._refuse(bad, pages)

    def mark(self, pages: PageList, state: HeaderState, sequences: SequenceList) -> None:
        """Change state words only. Bodies stay as they are, except that pages which had an end
        lose their tokens when they become FREE. Raises like ``write``."""
        page, count, extents = _page_list(pages)
        first, listed = _numbers(sequences, count)
        run = _RUN.pack(*self._place, state, first, 0, 0, 0, 0, 0, 0, page, count)
        bad = self._mark(run, extents, len(extents or b"") // 8, listed)
        if bad:
            self._refuse(bad, pages)

    def keep(self, pages: PageList, until_ms: int) -> None:
        """Keep pages that are COMMITTED and have an end until ``until_ms``; an end that is later
        already stays. Raises ``IndexError`` like ``write``."""
        page, count, extents = _page_list(pages)
        run = _RUN.pack(*self._place, 0, 0, 0, 0, 0, 0, 0, until_ms, page, count)
        bad = self._keep(run, extents, len(extents or b"") // 8)
        if bad:
            self._refuse(bad, pages)

    def _refuse(self, bad: int, pages: PageList) -> None:
        if bad < 0:
            raise ValueError("there are more tokens than a header holds")
        if isinstance(pages, bytes):
            first, count = struct.unpack_from("<II", pages, 8 * (bad - 1))
        else:
            first, count = pages.start, len(pages)
        raise IndexError(f"pages {first} to {first + count} are not all below {self._place[2]}")


def _page_list(pages: PageList) -> tuple[int, int, bytes | None]:
    """First page and page count of a run, or 0, the count and the extents."""
    if not isinstance(pages, bytes):
        first, count = pages.start, len(pages)
        if first < 0 or pages.stop != first + count or pages.stop > _PAGES_MAX:
            raise IndexError(f"pages {first} to {pages.stop} are no run of a pool's pages")
        return first, count, None
    if len(pages) % 8:
        raise ValueError(f"{len(pages)} bytes are no extents")
    return 0, sum(struct.unpack(f"<{len(pages) // 4}I", pages)[1::2]), pages


def _numbers(sequences: SequenceList, count: int) -> tuple[int, bytes | None]:
    """The first of ``count`` sequences and, unless they are consecutive, all of them packed."""
    if isinstance(sequences, bytes):
        if len(sequences) != 8 * count:
            raise ValueError(f"{len(sequences)} bytes are not {count} sequences of 64 bits")
        return 0, sequences
    if len(sequences) != count:
        raise ValueError(f"{len(sequences)} sequences for {count} pages")
    if sequences.stop != sequences.start + count:
        raise ValueError(f"sequences {sequences.start} to {sequences.stop} have gaps")
    return sequences.start, None
