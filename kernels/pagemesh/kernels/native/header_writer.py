"""How the pager writes headers: lists of pages whose numbers count up, at the speed of memory.

A grant or a commit gives its pages one state, writer and root, and ledger numbers one after the
other. So a call takes the list as extents and the rest as single values, and the native library
makes each header in place; nothing is laid out in Python first.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.native.headers import HeaderTable, address_of
from pagemesh.kernels.native.library import library
from pagemesh.wire.pool_format import HeaderState

U64 = NDArray[np.uint64]
_RUN = struct.Struct("<QqqQQQQQQqQ")  # PmHeaderRun of pagemesh_native.h


class HeaderWriter:
    """Writes into ``table``. Only the pager may.

    In each call ``extents`` are packed pairs (first page, page count) of uint32, and
    ``sequences`` one ledger number a page: a ``range`` when they count up.
    """

    def __init__(self, table: HeaderTable) -> None:
        form = table.form
        self._mapped = table.mapped  # keeps the map for as long as its address is used
        address = address_of(table.mapped) + form.headers_offset
        self._place = (address, form.header_words, form.page_count)
        self._native = library()

    def write(
        self, extents: bytes, state: HeaderState, sequences: range | U64, *, writer: int, root: int,
        first_identity: int = 0, parent: int = 0, tokens: bytes = b"", token_count: int = 0,
        until_ms: int = 0,
    ) -> None:  # fmt: skip
        """Write whole headers. Identities count up from ``first_identity`` (0: there are none),
        each page's parent is the one before it, that of the first is ``parent``; ``tokens`` are
        packed, ``token_count`` a page; all are kept ``until_ms`` (0: there is no end). Raises
        ``IndexError`` for pages that are not in the pool, ``ValueError`` when tokens or sequences
        do not fit the pages; then nothing is written."""
        first, listed = _numbers(extents, sequences)
        if len(tokens) != 4 * token_count * len(sequences):
            raise ValueError(f"{len(tokens)} bytes are not {token_count} tokens a page")
        run = _RUN.pack(
            *self._place, state, first, first_identity, parent, writer, root, token_count, until_ms
        )
        bad = self._native.pm_headers_write(run, extents, len(extents) // 8, listed, tokens)
        self._require(bad, extents)

    def mark(self, extents: bytes, state: HeaderState, sequences: range | U64) -> None:
        """Change state words only: bodies stay as they are, but for the tokens of what had an end
        and is FREE. Raises like ``write``."""
        first, listed = _numbers(extents, sequences)
        run = _RUN.pack(*self._place, state, first, 0, 0, 0, 0, 0, 0)
        self._require(
            self._native.pm_headers_mark(run, extents, len(extents) // 8, listed), extents
        )

    def keep(self, extents: bytes, until_ms: int, *, ends: bool = False) -> None:
        """Keep what is COMMITTED and has an end ``until_ms``, or for longer if that was so before;
        if it ``ends``, all that is COMMITTED, and no longer. Raises ``IndexError`` like
        ``write``."""
        run = _RUN.pack(*self._place, 0, 0, 0, 0, 0, 0, 0, until_ms)
        self._require(self._native.pm_headers_keep(run, extents, len(extents) // 8, ends), extents)

    def _require(self, bad: int, extents: bytes) -> None:
        if bad < 0:
            raise ValueError("there are more tokens than a header holds")
        if bad:
            first, count = struct.unpack_from("<II", extents, 8 * (bad - 1))
            raise IndexError(f"pages {first} to {first + count} are not all below {self._place[2]}")


def _numbers(extents: bytes, sequences: range | U64) -> tuple[int, bytes | None]:
    """The first of ``sequences`` and, unless they count up, all of them packed."""
    if len(extents) == 8:  # one run, as most lists are
        count = int.from_bytes(extents[4:], "little")
    else:
        count = sum(struct.unpack(f"<{len(extents) // 4}I", extents[: len(extents) & ~3])[1::2])
    if len(extents) % 8 or count != len(sequences):
        raise ValueError(f"{len(sequences)} sequences for {count} pages")
    if type(sequences) is range:
        return sequences.start, None
    return 0, sequences.astype("<u8", copy=False).tobytes()
