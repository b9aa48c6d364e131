"""Steps as CUDA graphs: one launch instead of hundreds.

A graph replays the same kernels at the same addresses, so one is captured for each bucket of
(rows that attend by themselves, spans of their context, rows of prompts), and a step is padded to
the smallest bucket that holds it. Without graphs a step that keeps the device busy only briefly is
bound by kernel launches: ten kernels a layer take the host 0.4 ms.

Common buckets are captured before the first step (``StepGraphs.prepare``), others once steps have
wanted them often. Until then the smallest captured bucket that holds such a step stands in, since a
capture takes longer than a few steps with padding. At the limit, the least recently used graph
makes room for one that was wanted often enough to be worth it. All graphs share the memory of their
inputs and outputs, since only one runs at a time.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagemesh.engine.cuda import driver
from pagemesh.engine.cuda.graph_bytes import (
    CHUNK_ROWS_MAX,
    GRAPH_COUNT_MAX,
    PROMPTS_MAX,
    ROWS_BESIDE_MIN,
    ROWS_MAX,
    rows_held,
)
from pagemesh.engine.cuda.launches import Launch
from pagemesh.engine.cuda.rows import DeviceRows, RowsShape, unpack
from pagemesh.runtime.logs import get_logger

WANTED_MIN = 16
"""Steps of a bucket without a graph before one is captured for which another has to make room: a
capture takes as long as some ten steps save by it."""
STOOD_IN_MIN = 64
"""Steps of a bucket for which another stood in before it gets its own graph: they lose less."""
_COMMON_ROWS_MAX = 64
_COMMON_SPANS = (1, 4, 16)
_CHUNKS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, CHUNK_ROWS_MAX)
"""Numbers of rows for which steps of only prompts are captured: at most a third of the rows, or 15,
are padding."""
_CHUNKS_BESIDE = (16, 64, 128, 256, 512, CHUNK_ROWS_MAX)
"""The same for prompts beside rows that attend by themselves. These numbers are fewer, as are those
of spans, since such steps come in many combinations, most of them rare, and capturing each would
take longer than its padding."""
_SPANS_BESIDE_MIN = 4
_STAND_IN_ROWS = (8, 32, 128, ROWS_MAX)
_STAND_IN_CHUNKS = (64, 256, 512, CHUNK_ROWS_MAX)
_STAND_IN_SPANS = (4, 16)
"""Buckets of prompts beside other rows that are captured in advance, so that one of them holds any
such step whose contexts have up to 4,096 tokens."""
_PADDING_TIMES_MAX = 4
"""A bucket that stands in has at most this many times the rows of the step's own bucket, plus
``_PADDING_ROWS``, which cost a step next to nothing."""
_PADDING_ROWS = 64
_log = get_logger(__name__)

Tensor = torch.Tensor
Step = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""From words as ``rows.pack`` makes them and a count: hidden states and logits of that many wanted
rows, the first ones."""
Body = Callable[[DeviceRows, Tensor, Tensor], None]
"""Writes hidden states and logits of rows to the given tensors."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a graph is captured for: each number is the most a step may have."""

    rows: int
    """Those that attend by themselves."""
    spans: int
    chunk: int = 0
    """Rows of prompts, in blocks."""

    @property
    def sequences(self) -> int:
        """The most sequences, and the most wanted rows, of a step."""
        return self.rows + (PROMPTS_MAX if self.chunk else 0)

    def shape(self, pages: int, block_rows: int) -> RowsShape:
        """Its sections, with ``pages`` entries of page tables in all and blocks of ``block_rows``
        rows."""
        blocks = -(-self.chunk // block_rows) + PROMPTS_MAX if self.chunk else 0
        return RowsShape(self.rows + self.chunk, self.sequences, blocks, self.sequences, pages)

    @property
    def launches(self) -> tuple[Launch, ...]:
        return (Launch(0, self.rows, self.spans),) if self.rows else ()

    def stands_in(self, other: Bucket) -> bool:
        """Whether steps of ``other`` may be padded to this one."""
        is_alike = bool(self.rows) == bool(other.rows) and bool(self.chunk) == bool(other.chunk)
        is_larger = (
            self.rows >= other.rows and self.spans >= other.spans and self.chunk >= other.chunk
        )
        padded_max = _PADDING_TIMES_MAX * (other.rows + other.chunk) + _PADDING_ROWS
        return is_alike and is_larger and self.rows + self.chunk <= padded_max


def bucket_of(rows: int, spans: int, chunk: int = 0) -> Bucket | None:
    """The smallest bucket that holds a step; None when the step is too large for any, or empty.

    Without prompts, rows are rounded up to powers of two up to 8, to multiples of 8 up to 64 and of
    16 above, so that at most half of them, or 15, are padding. Beside prompts they are rounded up
    to powers of two from 8 on, and prompts to fewer sizes. ``spans`` are coarse already
    (``launches.SPANS_STEPS``).
    """
    if rows + chunk < 1 or rows > ROWS_MAX or chunk > CHUNK_ROWS_MAX:
        return None
    if chunk and not rows:
        return Bucket(0, 1, _CHUNKS[bisect.bisect_left(_CHUNKS, chunk)])
    if chunk:
        return Bucket(
            max(1 << (rows - 1).bit_length(), ROWS_BESIDE_MIN),
            max(spans, _SPANS_BESIDE_MIN),
            _CHUNKS_BESIDE[bisect.bisect_left(_CHUNKS_BESIDE, chunk)],
        )
    if rows <= 8:
        return Bucket(1 << (rows - 1).bit_length(), spans)
    step = 8 if rows <= 64 else 16
    return Bucket(-(-rows // step) * step, spans)


def common_buckets(rows_max: int, spans_max: int) -> list[Bucket]:
    """The buckets of most steps of up to ``rows_max`` rows and ``spans_max`` spans, and those that
    stand in for others. The largest with prompts come first: the others fit into their memory."""
    spans_there = [spans for spans in _COMMON_SPANS if spans < 4 * spans_max]
    beside = [
        bucket_of(rows, spans, chunk)
        for chunk in reversed(_STAND_IN_CHUNKS)
        for rows in sorted(
            {min(rows, rows_held(rows_max)) for rows in _STAND_IN_ROWS}, reverse=True
        )
        for spans in _STAND_IN_SPANS
        if spans in spans_there
    ]
    prompts = [Bucket(0, 1, chunk) for chunk in reversed(_CHUNKS)]
    alone = [
        bucket_of(rows, spans)
        for rows in range(1, min(rows_max, _COMMON_ROWS_MAX) + 1)
        for spans in spans_there
    ]
    found = [*beside, *prompts, *alone]
    return list(dict.fromkeys(bucket for bucket in found if bucket is not None))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether ``error`` means that the device is out of memory. Only torch's own allocations raise
    a class of their own; graphs, kernels and libraries get memory from the driver."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    text = str(error).lower()
    return "out of memory" in text or "alloc_failed" in text


def warn_of_memory(graph_count: int) -> None:
    """Warn that there are ``graph_count`` graphs and no memory for more."""
    _log.warning(
        "worker.graphs_limited", graphs=graph_count,
        why="the device has no memory for another CUDA graph; steps without one take longer",
        remedy="lower PAGEMESH_POOL_BYTES, or PAGEMESH_SEQUENCE_COUNT_MAX",
    )  # fmt: skip


class GraphMemory:
    """Memory that the graphs of one decoder and pool share: inputs, outputs and intermediates."""

    def __init__(
        self, device: torch.device, stream: Any, *, rows_max: int, table_pages_max: int,
        block_rows: int, hidden_size: int, vocab_tokens: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """``stream``: a ``torch.cuda.Stream`` to capture on; ``table_pages_max``: of a sequence;
        ``block_rows``: rows of a block of prompts."""
        self.stream = stream
        self.table_pages_max = table_pages_max
        self.block_rows = block_rows
        self.handle: Any = torch.cuda.graph_pool_handle()
        widest = Bucket(rows_max, 1, CHUNK_ROWS_MAX)
        with torch.inference_mode(False):  # written to by steps inside and outside of that mode
            self.words = torch.zeros(self.shape(widest).words, dtype=torch.int32, device=device)
            self.hidden = torch.zeros((widest.sequences, hidden_size), dtype=dtype, device=device)
            self.logits = torch.zeros((widest.sequences, vocab_tokens), device=device)

    def shape(self, bucket: Bucket) -> RowsShape:
        """The bucket's sections, with page tables of the greatest length."""
        return bucket.shape(bucket.sequences * self.table_pages_max, self.block_rows)


class CapturedStep:
    """One graph."""

    def __init__(self, bucket: Bucket, body: Body, memory: GraphMemory) -> None:
        """Captures ``body``. Raises ``RuntimeError``, also when there is no memory
        (``is_out_of_memory``)."""
        shape, wanted = memory.shape(bucket), bucket.sequences
        self._words = memory.words[: shape.words]
        self._hidden, self._logits = memory.hidden[:wanted], memory.logits[:wanted]
        rows = unpack(shape, self._words, bucket.launches)
        self._words.zero_()
        rows.batch.row_position.fill_(-1)
        rows.batch.slots.fill_(-1)
        current = torch.cuda.current_stream(self._words.device)
        # Once without capture: kernels are compiled and libraries set up here, which a capture
        # does not allow. All rows are padding, so no page is touched.
        memory.stream.wait_stream(current)
        with torch.cuda.stream(memory.stream):
            body(rows, self._hidden, self._logits)
        current.wait_stream(memory.stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on, with copies of pages, but not synchronise the whole device.
        with (
            driver.WHOLE_DEVICE,
            torch.cuda.graph(
                self._graph, pool=memory.handle, stream=memory.stream,
                capture_error_mode="thread_local",
            ),
        ):  # fmt: skip
            body(rows, self._hidden, self._logits)

    def __call__(self, words: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Hidden states and logits of the first ``count`` wanted rows; the next step, of whatever
        graph, overwrites them. ``words``: int32 on the host, pinned, as ``rows.pack`` makes
        them."""
        self._words[: len(words)].copy_(words, non_blocking=True)
        self._graph.replay()
        return self._hidden[:count], self._logits[:count]


class StepGraphs:
    """Graphs by bucket, the least recently used first."""

    def __init__(self, capture: Callable[[Bucket], Step], count_max: int = GRAPH_COUNT_MAX) -> None:
        """``capture`` may raise what ``is_out_of_memory`` recognises: from then on there are no
        more graphs than at that time."""
        self._capture = capture
        self._count_max = count_max
        self._steps: OrderedDict[Bucket, Step] = OrderedDict()
        self._missed: dict[Bucket, int] = {}
        """By bucket, of which there are few: steps without a graph since it last had its own."""
        self._is_out_of_memory = False

    def __len__(self) -> int:
        return len(self._steps)

    def step_for(
        self, bucket: Bucket, may_stand_in: Callable[[Bucket], bool] = lambda _: True
    ) -> tuple[Bucket, Step] | None:
        """The bucket of the graph for a step of ``bucket``, and the graph: its own or, until that
        is wanted often, a larger one that ``may_stand_in``. None when neither exists, for want of
        room or because ``bucket`` is not wanted often enough yet."""
        if bucket not in self._steps:
            self._missed[bucket] = self._missed.get(bucket, 0) + 1
            larger = [one for one in self._steps if one.stands_in(bucket) and may_stand_in(one)]
            if self._is_wanted(bucket, is_stood_in_for=bool(larger)):
                self._keep(bucket)
            if bucket not in self._steps:
                larger = [one for one in larger if one in self._steps]
                if not larger:
                    return None
                bucket = min(larger, key=lambda one: (one.rows + one.chunk, one.spans))
        self._steps.move_to_end(bucket)
        return bucket, self._steps[bucket]

    def _is_wanted(self, bucket: Bucket, *, is_stood_in_for: bool) -> bool:
        missed, has_room = self._missed[bucket], len(self._steps) < self._count_max
        # Out of memory, making room does not help: a dropped graph may free less than a new one
        # takes.
        if is_stood_in_for:
            return missed >= STOOD_IN_MIN and not self._is_out_of_memory
        return has_room or (missed >= WANTED_MIN and not self._is_out_of_memory)

    def prepare(
        self, buckets: Sequence[Bucket], *, seconds_max: float, now_s: Callable[[], float]
    ) -> int:
        """Capture ``buckets`` in this order until all are done, the limit is reached or
        ``seconds_max`` have passed; returns how many graphs there are."""
        until_s = now_s() + seconds_max
        for bucket in buckets:
            if now_s() >= until_s or len(self._steps) >= self._count_max:
                break
            self._keep(bucket)
        return len(self._steps)

    def _keep(self, bucket: Bucket) -> None:
        """Capture ``bucket`` if there is memory for it. At the limit, the least recently used graph
        is dropped first."""
        self._missed.pop(bucket, None)
        if len(self._steps) >= self._count_max:
            if not self._steps:
                return
            self._steps.popitem(last=False)
        try:
            self._steps[bucket] = self._capture(bucket)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._is_out_of_memory = True
            self._count_max = len(self._steps)
            warn_of_memory(self._count_max)
