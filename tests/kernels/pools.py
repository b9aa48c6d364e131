"""Small pools for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.native.headers import HeaderBatch
from pagemesh.kernels.native.superblock import Superblock
from pagemesh.wire.pool_format import HeaderState, PoolFormat

PAGE_SIZE = 16


def superblock(page_count: int = 64, *, page_bytes: int = 256) -> Superblock:
    return Superblock(PoolFormat(page_count, PAGE_SIZE, page_bytes), 0xABCD, b"layout!!" * 4)


def pool_path(folder: Path, name: str = "test") -> Path:
    return folder / f"{name}.pool"


def headers(
    pages: Sequence[int],
    *,
    sequence: int,
    state: HeaderState = HeaderState.HELD,
    mark: int = 1,
) -> HeaderBatch:
    """Headers whose every word follows from ``mark``, so that two marks differ in all words."""
    count = len(pages)

    def words(offset: int) -> NDArray[np.uint64]:
        return np.full(count, mark * 1000 + offset, np.uint64)

    return HeaderBatch(
        pages=np.asarray(pages, np.uint32),
        states=np.full(count, state, np.uint8),
        sequences=np.full(count, sequence, np.uint64),
        identities=words(1),
        parents=words(2),
        writers=words(3),
        roots=np.full(count, mark, np.uint32),
        counts=np.full(count, PAGE_SIZE, np.uint32),
        tokens=np.full((count, PAGE_SIZE), mark, np.uint32),
        checksums=words(5),
    )
