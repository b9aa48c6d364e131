"""``edit_rows`` row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagemesh.kernels.edit_rows.column_counts import F32

if TYPE_CHECKING:
    from pagemesh.kernels.edit_rows import RowEdits


def edit_rows(x: torch.Tensor, rows: torch.Tensor, edits: Sequence[RowEdits]) -> torch.Tensor:
    saved = x[rows]
    for row, one in zip(rows.tolist(), edits, strict=True):
        _edit(x[row].numpy(), one)
    return saved


def _edit(row: F32, edits: RowEdits) -> None:
    width = len(row)
    if edits.masks:
        row[edits.masked[edits.masked < width]] = -np.inf
    known = edits.biased < width
    row[edits.biased[known]] += edits.biases[known]
    repeated, penalty = edits.repeated.columns, np.float32(edits.repetition)
    old = row[repeated]
    row[repeated] = np.where(old > 0, old / penalty, old * penalty)
    counted = edits.counted.columns
    lowered = row[counted] - np.float32(edits.frequency) * edits.counted.counts
    row[counted] = lowered - np.float32(edits.presence)
