"""The ragged batch of a step: whose token each row is, and where its K and V go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

WINDOW_TOKENS_MAX = 2**63 - 1
"""No window: a row sees every position up to its own."""


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Rows of several sequences, one after the other. All tensors are int on the CPU.

    ``tables``        int32 [pages]          page tables, concatenated
    ``table_indptr``  int32 [sequences + 1]  where each sequence's page table starts in them
    ``row_indptr``    int32 [sequences + 1]  where each sequence's rows start
    ``row_sequence``  int32 [rows]           index of the row's sequence
    ``row_position``  int32 [rows]           position of the row's token, ascending in a sequence
    ``slots``         int64 [rows]           page * page_size + slot of the row's token
    """

    tables: torch.Tensor
    table_indptr: torch.Tensor
    row_indptr: torch.Tensor
    row_sequence: torch.Tensor
    row_position: torch.Tensor
    slots: torch.Tensor

    @property
    def rows(self) -> int:
        return self.row_sequence.shape[0]

    @property
    def sequences(self) -> int:
        return self.table_indptr.shape[0] - 1


def ragged_batch(
    page_tables: Sequence[NDArray[np.uint32]],
    starts: Sequence[int],
    counts: Sequence[int],
    page_size: int,
) -> RaggedBatch:
    """The batch in which sequence ``i`` has rows for positions ``starts[i]`` to
    ``starts[i] + counts[i]`` (exclusive).

    Raises ``ValueError`` when a page table is too short for its positions.
    """
    lengths = np.fromiter((len(table) for table in page_tables), np.int64, len(page_tables))
    first, count = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    short = np.flatnonzero((first < 0) | (count < 0) | (first + count > lengths * page_size))
    if len(short):
        worst = int(short[0])
        raise ValueError(
            f"sequence {worst} has {lengths[worst]} pages of {page_size} slots, too few for "
            f"positions {first[worst]} to {first[worst] + count[worst]}"
        )
    table_indptr = np.concatenate(([0], np.cumsum(lengths)))
    row_indptr = np.concatenate(([0], np.cumsum(count)))
    tables = (
        np.concatenate(page_tables).astype(np.int32) if len(page_tables) else np.empty(0, np.int32)
    )
    sequence = np.repeat(np.arange(len(lengths)), count)
    position = np.arange(int(row_indptr[-1])) - row_indptr[sequence] + first[sequence]
    page = tables[table_indptr[sequence] + position // page_size].astype(np.int64)
    return RaggedBatch(
        tables=torch.from_numpy(tables),
        table_indptr=torch.from_numpy(table_indptr.astype(np.int32)),
        row_indptr=torch.from_numpy(row_indptr.astype(np.int32)),
        row_sequence=torch.from_numpy(sequence.astype(np.int32)),
        row_position=torch.from_numpy(position.astype(np.int32)),
        slots=torch.from_numpy(page * page_size + position % page_size),
    )
