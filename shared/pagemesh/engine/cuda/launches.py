"""How the rows of a step attend: which by themselves, in which launches, and which in blocks.

    sequence with few rows    each row by itself: ``paged_attention``, its context in spans
    sequence with many        a block of rows at a time: ``paged_prefill``, K and V read once

So in a mixed step prompt chunks are computed in blocks, and single tokens by themselves. The latter
come first, the longest context first, so that a launch is a slice of all arrays and its first row
determines how many spans it needs room for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagemesh.engine.cuda.graph_bytes import STATES_BYTES_MAX
from pagemesh.kernels.ops import RaggedBatch

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
CHUNK_ROWS_MIN = 4
"""Rows from which a sequence is computed in blocks: with fewer, tiles would be mostly empty, and
each row by itself keeps more of the device busy."""
IDLE_SPANS_MAX = 4_096
"""Unused (row, span) pairs that a launch may have room for. Each is a program that ends at once; up
to this many cost less than another launch."""
ALIGNED_ROWS = 4
"""Launches begin at multiples of this many rows, which are 16 bytes of int32: kernels are compiled
separately for arrays that are aligned to 16 bytes and for those that are not."""
SPANS_STEPS = 4 ** np.arange(16, dtype=np.int64)
"""Numbers of spans that a launch may have room for: few, since kernels are compiled, and graphs
captured, for each of them."""
NO_BLOCKS = np.empty((0, 2), np.int32)


@dataclass(frozen=True, slots=True)
class Launch:
    """Rows ``first`` to ``end`` (exclusive), each by itself, with room for ``spans`` spans."""

    first: int
    end: int
    spans: int

    @property
    def room(self) -> int:
        """(row, span) pairs."""
        return (self.end - self.first) * self.spans


@dataclass(frozen=True, slots=True)
class StepRows:
    """``order`` int64 [rows]: the rows of the batch in the order in which they are computed; None:
    in the batch's order. ``launches`` and ``blocks`` (int32 [n, 2], see ``paged_prefill.blocks``)
    refer to that order."""

    order: I64 | None
    launches: tuple[Launch, ...]
    blocks: I32

    @property
    def alone_count(self) -> int:
        """Rows that attend by themselves."""
        return self.launches[-1].end if self.launches else 0


def split_rows(
    batch: RaggedBatch, *, span_tokens: int, span_bytes: int, blocks_of: Callable[[I64], I32]
) -> StepRows:
    """How the rows of ``batch``, which is on the host, attend.

    ``span_tokens``: positions of a span; ``span_bytes``: the partial result of one (row, span)
    pair; ``blocks_of``: gives the ``row_blocks`` of sequences whose rows start there."""
    starts = batch.row_indptr.numpy().astype(np.int64)
    counts = np.diff(starts)
    is_chunk = counts >= CHUNK_ROWS_MIN
    needs = _spans_needed(batch.row_position.numpy(), span_tokens)
    if is_chunk.all():
        return StepRows(None, (), blocks_of(starts))
    if not is_chunk.any():
        whole = Launch(0, batch.rows, int(needs.max(initial=1)))
        if _fits(whole, int(needs.sum()), span_bytes):
            return StepRows(None, (whole,), NO_BLOCKS)
    in_chunk = np.repeat(is_chunk, counts)
    alone, others = np.flatnonzero(~in_chunk), np.flatnonzero(in_chunk)
    alone = alone[np.argsort(-needs[alone], kind="stable")]
    launches = _cut(needs[alone], span_bytes) if len(alone) else ()
    blocks = NO_BLOCKS
    if len(others):
        blocks = blocks_of(len(alone) + np.concatenate(([0], np.cumsum(counts[is_chunk]))))
    return StepRows(np.concatenate((alone, others)), launches, blocks)


def _spans_needed(position: NDArray[np.integer], span_tokens: int) -> I64:
    """int64 [rows]: the spans that a launch of each row alone would have room for."""
    return SPANS_STEPS[np.searchsorted(SPANS_STEPS * span_tokens, position + 1)]


def _fits(launch: Launch, needed: int, span_bytes: int) -> bool:
    """Whether one launch suits rows that together need ``needed`` of its (row, span) pairs."""
    few = launch.end - launch.first <= ALIGNED_ROWS
    return few or is_within_limits(launch, needed, span_bytes)


def is_within_limits(launch: Launch, needed: int, span_bytes: int) -> bool:
    """Whether a launch that uses ``needed`` of its (row, span) pairs is within the limits of memory
    and of unused pairs."""
    is_small = launch.room * span_bytes <= STATES_BYTES_MAX
    return is_small and launch.room - needed <= IDLE_SPANS_MAX


def _cut(needs: I64, span_bytes: int) -> tuple[Launch, ...]:
    """Launches over rows that need ``needs`` spans each, in descending order."""
    sums = np.concatenate(([0], np.cumsum(needs)))
    launches, first = [], 0
    for row in range(ALIGNED_ROWS, len(needs), ALIGNED_ROWS):
        spans = int(needs[first])
        grown = Launch(first, min(row + ALIGNED_ROWS, len(needs)), spans)
        if not _fits(grown, int(sums[grown.end] - sums[first]), span_bytes):
            launches.append(Launch(first, row, spans))
            first = row
    return (*launches, Launch(first, len(needs), int(needs[first])))
