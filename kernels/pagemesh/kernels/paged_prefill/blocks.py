"""Which rows of prompts a GPU takes together, and where their contexts are."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.paged_attention.tiles import PAIRS

I32 = NDArray[np.int32]
BLOCK_WORDS = 4
"""Of a block with its context."""


def block_rows(group: int) -> int:
    """Rows of a block; ``group``: query heads that share a KV head."""
    return max(PAIRS // group, 1)


def row_blocks(row_indptr: NDArray[np.integer], group: int) -> I32:
    """int32 [blocks, 2]: first and end row of each block of rows, none of two sequences; last rows
    first, since they look at most and what begins late with much to do keeps all waiting.

    ``row_indptr``: [sequences + 1]; ``group``: query heads that share a KV head.
    """
    rows = block_rows(group)
    found = [
        (first, min(first + rows, end))
        for start, end in itertools.pairwise(row_indptr.tolist())
        for first in range(start, end, rows)
    ]
    return np.array(found[::-1], np.int32).reshape(-1, 2)


def with_contexts(
    blocks: I32,
    row_position: NDArray[np.integer],
    row_sequence: NDArray[np.integer],
    table_indptr: NDArray[np.integer],
) -> I32:
    """int32 [blocks, 4]: ``blocks``, the position of each one's first row, and where the page table
    of its sequence begins: all that a program has to know, in one load. Positions and sequences
    are of the rows that ``blocks`` names."""
    first = blocks[:, 0]
    contexts = (row_position[first], table_indptr[row_sequence[first]])
    return np.column_stack((blocks, *contexts)).astype(np.int32)
