"""The arrays of a step, made from its rows.

While the same sequences decode one token at a time, which is nearly always the case, the arrays of
the previous step are reused: tokens, positions and slots are overwritten, the rest stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine.worker.plan import StepRow
from pagemesh.kernels.ops import RaggedBatch, ragged_batch
from pagemesh.wire.tokens import U32

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """``tokens`` int64 [T]; ``wanted`` int64 [n], the rows of ``batch`` whose last hidden state
    is needed; ``ends`` int64 [rows], for each row of the plan, where its entries in ``wanted`` end.
    ``scoring``: some of those entries are for prompt scores."""

    tokens: torch.Tensor
    batch: RaggedBatch
    wanted: torch.Tensor
    ends: I64
    scoring: bool


class ArrayKeeper:
    """Makes ``StepArrays``; those of one step are valid until those of the next are made."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._tables: list[U32] = []
        """Page tables of the previous step, if all its rows were single tokens to draw from."""
        self._kept: StepArrays | None = None
        self._tokens, self._positions, self._slots = (np.empty(0, np.int64) for _ in range(3))

    def arrays(self, rows: Sequence[StepRow]) -> StepArrays:
        """Raises ``IndexError`` or ``ValueError`` for a page table that is too short."""
        if not all(_is_single(row) for row in rows):
            self._kept = None
            return made(rows, self._page_size)
        if self._kept is None or not self._is_same(rows):
            self._keep(rows)
        assert self._kept is not None
        size = self._page_size
        starts = [row.start for row in rows]
        self._tokens[:] = [row.tokens[0] for row in rows]
        self._positions[:] = starts
        self._slots[:] = [
            int(table[start // size]) * size + start % size
            for table, start in zip(self._tables, starts, strict=True)
        ]
        return self._kept

    def _is_same(self, rows: Sequence[StepRow]) -> bool:
        return len(rows) == len(self._tables) and all(
            row.page_table is table for row, table in zip(rows, self._tables, strict=True)
        )

    def _keep(self, rows: Sequence[StepRow]) -> None:
        kept = made(rows, self._page_size)
        self._tables = [row.page_table for row in rows]
        self._tokens = kept.tokens.numpy()
        self._positions = kept.batch.row_position.numpy()
        self._slots = kept.batch.slots.numpy()
        self._kept = kept


def made(rows: Sequence[StepRow], page_size: int) -> StepArrays:
    """New arrays for ``rows``. Raises ``ValueError`` for a page table that is too short."""
    counts = [len(row.tokens) for row in rows]
    batch = ragged_batch(
        [row.page_table for row in rows], [row.start for row in rows], counts, page_size
    )
    offsets = np.cumsum(counts) - counts
    wanted = [_wanted(row) for row in rows]
    indices = np.concatenate([offset + own for offset, own in zip(offsets, wanted, strict=True)])
    tokens = np.concatenate([row.tokens for row in rows]).astype(np.int64)
    return StepArrays(
        tokens=torch.from_numpy(tokens),
        batch=batch,
        wanted=torch.from_numpy(indices),
        ends=np.cumsum([len(own) for own in wanted]),
        scoring=any(row.score_from is not None for row in rows),
    )


def targets(row: StepRow) -> I64 | None:
    """int64 [n], the tokens to score: those after the first whose logits count, then
    ``score_next`` if there is one. ``None`` when the row is not scored."""
    first = _first_scored(row)
    if first is None:
        return None
    after = row.tokens[first + 1 :].astype(np.int64)
    if row.score_next is None or first == len(row.tokens):
        return after
    return np.append(after, row.score_next)


def wanted_count(row: StepRow) -> int:
    """How many of the row's hidden states are needed."""
    return len(_wanted(row))


def _is_single(row: StepRow) -> bool:
    return len(row.tokens) == 1 and bool(row.samples) and row.score_from is None


def _first_scored(row: StepRow) -> int | None:
    """Index in the row's tokens of the first whose logits score the next token."""
    if row.score_from is None:
        return None
    return min(max(row.score_from - row.start, 0), len(row.tokens))


def _wanted(row: StepRow) -> I64:
    """int64 [n], ascending: indices of the row's tokens whose last hidden state is needed. Those
    for scores come first; a row that draws always ends with its last token."""
    scored, count = targets(row), len(row.tokens)
    if scored is None or not len(scored):
        return np.array([count - 1] if row.samples else [], np.int64)
    first = _first_scored(row) or 0
    last = count if row.samples else first + len(scored)
    return np.arange(first, last)
