"""Small pools for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pagemesh.kernels.native.header_writer import HeaderWriter
from pagemesh.kernels.native.headers import HeaderTable
from pagemesh.kernels.native.superblock import Superblock
from pagemesh.wire.pool_format import HeaderState, PoolFormat
from pagemesh.wire.tokens import pack, pack_extents

PAGE_SIZE = 16


def superblock(page_count: int = 64, *, page_bytes: int = 256) -> Superblock:
    return Superblock(PoolFormat(page_count, PAGE_SIZE, page_bytes), 0xABCD, b"layout!!" * 4)


def pool_path(folder: Path, name: str = "test") -> Path:
    return folder / f"{name}.pool"


def write_headers(
    table: HeaderTable,
    pages: Sequence[int],
    *,
    sequence: int,
    state: HeaderState = HeaderState.HELD,
    mark: int = 1,
) -> None:
    """Headers whose every word follows from ``mark``, so that two marks differ in all words.
    Identities count up from ``1000 * mark + 1``."""
    count = len(pages)
    HeaderWriter(table).write(
        pack_extents(pages), state, np.full(count, sequence, np.uint64), writer=1000 * mark + 3,
        root=mark, first_identity=1000 * mark + 1, parent=1000 * mark + 2,
        tokens=pack([mark] * count * table.form.page_size), token_count=table.form.page_size,
    )  # fmt: skip
