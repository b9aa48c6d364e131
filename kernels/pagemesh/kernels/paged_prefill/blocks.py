"""Which rows of prompts a GPU computes together, and where their contexts are."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.paged_attention.tiles import PAIRS

I32 = NDArray[np.int32]
BLOCK_WORDS = 4
"""int32 words of a block with its context."""


def block_rows(group: int) -> int:
    """Rows of a block; ``group``: query heads that share a KV head."""
    return max(PAIRS // group, 1)


def row_blocks(row_indptr: NDArray[np.integer], group: int) -> I32:
    """int32 [blocks, 2]: first and end row of each block, whose rows are all of one sequence. The
    last rows come first, since they have the longest contexts, and a long block that starts late
    would keep everything waiting.

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
    of its sequence begins: all that a program has to know, in one load. ``row_position`` and
    ``row_sequence`` are those of the rows to which ``blocks`` refers."""
    first = blocks[:, 0]
    contexts = (row_position[first], table_indptr[row_sequence[first]])
    return np.column_stack((blocks, *contexts)).astype(np.int32)
