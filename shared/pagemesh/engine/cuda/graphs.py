"""Decode steps as CUDA graphs: one launch instead of hundreds.

A graph replays the same kernels at the same addresses, so one is captured for each bucket of
(rows, spans of context, pages) and a step is padded to the smallest bucket that holds it. A
small model's decode step on a GPU is otherwise bound by launching: ten kernels a layer, some
microseconds each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pagemesh.engine.cuda.rows import DeviceRows, RowsShape, unpack

GRAPH_COUNT_MAX = 48
"""Captured at once; beyond that a step runs without. Each holds its activations, but all
share one pool of memory, since only one runs at a time."""
ROWS_MAX = 256
_WARM_UP_RUNS = 2

Body = Callable[[DeviceRows, int], tuple[torch.Tensor, torch.Tensor]]
"""Hidden states and logits of rows, given a number of spans."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a graph is captured for: each number is the most a step may have."""

    rows: int
    spans: int
    pages: int

    @property
    def shape(self) -> RowsShape:
        """One row a sequence, every row wanted."""
        return RowsShape(self.rows, self.rows, 0, self.rows, self.pages)


def bucket_of(rows: int, spans: int, pages: int) -> Bucket | None:
    """The smallest bucket that holds a decode step, None when no graph is worth it.

    Rows go by powers of two up to 8 and by eights above, so that at most 7 of them, or half,
    are padding; spans and pages by powers of two.
    """
    if rows < 1 or rows > ROWS_MAX:
        return None
    kept = _power_of_two(rows) if rows <= 8 else -(-rows // 8) * 8
    return Bucket(kept, _power_of_two(spans), _power_of_two(max(pages, kept)))


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


class CapturedStep:
    """One graph with its own inputs and outputs."""

    def __init__(self, bucket: Bucket, body: Body, device: torch.device, memory: Any) -> None:
        """Captures ``body``; ``memory`` is ``torch.cuda.graph_pool_handle()``, shared by all
        graphs."""
        self._words = torch.full((bucket.shape.words,), -1, dtype=torch.int32, device=device)
        rows = unpack(bucket.shape, self._words)
        for section in (rows.tokens, rows.wanted, rows.batch.row_sequence, rows.batch.tables):
            section.zero_()
        rows.batch.table_indptr.zero_()
        # Once or twice without capture: kernels are compiled and libraries set up here, which
        # a capture does not allow. All rows are padding, so no page is touched.
        side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                body(rows, bucket.spans)
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on: one of them makes or maps memory for a pool.
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._hidden, self._logits = body(rows, bucket.spans)

    def __call__(self, words: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of the first ``count`` rows; the next call overwrites them.
        ``words``: int32 on the host, pinned, as ``rows.pack`` makes them."""
        self._words.copy_(words, non_blocking=True)
        self._graph.replay()
        return self._hidden[:count], self._logits[:count]


class DecodeGraphs:
    """Graphs by bucket, captured when first wanted."""

    def __init__(self, body: Body, device: torch.device) -> None:
        self._body = body
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._steps: dict[Bucket, CapturedStep] = {}

    def step_for(self, bucket: Bucket) -> CapturedStep | None:
        """The graph of ``bucket``; None when there are too many already."""
        found = self._steps.get(bucket)
        if found is None and len(self._steps) < GRAPH_COUNT_MAX:
            found = CapturedStep(bucket, self._body, self._device, self._memory)
            self._steps[bucket] = found
        return found
