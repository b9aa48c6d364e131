"""A model on a device, with the interface of ``engine.forward.Decoder``.

Inputs are on the host; hidden states and logits stay on the device, where tokens are drawn
(``cuda.sampler``). Nothing here waits for the device.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
import torch

from pagemesh.engine.cuda.forward import DeviceForward
from pagemesh.engine.cuda.graph_bytes import ROWS_MAX, rows_held
from pagemesh.engine.cuda.graphs import (
    Bucket,
    CapturedStep,
    GraphMemory,
    Step,
    StepGraphs,
    bucket_of,
    common_buckets,
    is_out_of_memory,
    warn_of_memory,
)
from pagemesh.engine.cuda.launches import (
    NO_BLOCKS,
    SPANS_STEPS,
    Launch,
    StepRows,
    is_within_limits,
    split_rows,
)
from pagemesh.engine.cuda.rows import DeviceRows, RowsShape, exact_shape, pack, unpack
from pagemesh.engine.cuda.weights import DeviceWeights
from pagemesh.engine.model import DecoderConfig
from pagemesh.kernels.ops import KvPool, RaggedBatch, ragged_batch
from pagemesh.kernels.paged_prefill.blocks import block_rows, row_blocks
from pagemesh.runtime.logs import get_logger

Tensor = torch.Tensor
PREPARE_S_MAX = 15.0
"""For capturing graphs before there is work; the others are captured on demand."""
_WARM_UP_ROWS = 4
_log = get_logger(__name__)


class CudaDecoder:
    """One thread at a time, like the CPU's."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: DeviceWeights,
        *,
        with_graphs: bool,
        sequence_count_max: int = ROWS_MAX,
    ) -> None:
        """``with_graphs``: capture steps of up to ``sequence_count_max`` rows, not counting those
        of prompts; needs a CUDA device."""
        from pagemesh.kernels.paged_attention.triton import SPAN_TOKENS

        self._span_tokens = SPAN_TOKENS
        self._block_rows = block_rows(config.head_count // config.kv_head_count)
        self._span_bytes = 4 * config.head_count * (config.head_dim + 1)
        self.config = config
        self._forward = DeviceForward(config, weights)
        self._pool: weakref.ref[KvPool] | None = None
        """The running step's. Weak, since memory is freed only with the last view of it."""
        self._memory: tuple[object, ...] | None = None
        self._graphs: StepGraphs | None = None
        self._graph_rows_max = 0
        self._side: Any = None
        if with_graphs:
            widest = bucket_of(min(sequence_count_max, ROWS_MAX), 1)
            self._graph_rows_max = widest.rows if widest else 0
            # Made only once: torch hands out a few in turn, and pages are copied on another.
            self._side = torch.cuda.Stream(self._forward.device)  # type: ignore[no-untyped-call]
        self._table_pages_max = 0
        self._is_prepared = False

    run = None

    def step(
        self, tokens: Tensor, batch: RaggedBatch, wanted: Tensor, pool: KvPool, *, logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states and, when asked for, float32 logits of the rows ``wanted`` (int64 [n],
        ascending); the next step may overwrite both. ``tokens``: int64 [T], on the host like
        ``batch``. Writes K and V of all T rows to ``pool``."""
        self._use(pool)
        split = self._split(batch)
        found = self._graph_of(batch, len(wanted), split)
        if found is not None:
            shape, prompts_from, captured = found
            padded = self._staged(
                pack(shape, tokens, batch, wanted, split, prompts_from=prompts_from)
            )
            hidden, all_logits = captured(padded, len(wanted))
            return hidden, all_logits if logits else None
        shape = exact_shape(batch, len(wanted), len(split.blocks))
        words = self._staged(pack(shape, tokens, batch, wanted, split))
        on_device = words.to(self._forward.device, non_blocking=True)
        hidden = self._forward.hidden(unpack(shape, on_device, split.launches), pool)
        return hidden, self.logits(hidden) if logits else None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of ``hidden`` rows."""
        return self._forward.logits(hidden)

    @property
    def graph_count(self) -> int:
        """Graphs that are captured and kept."""
        return len(self._graphs) if self._graphs is not None else 0

    def warm_up(self, pool: KvPool) -> None:
        """Compile every kernel of a step by running steps in the first page of ``pool``, which
        nobody may use: a compilation in the middle of an answer delays it by seconds."""
        size = pool.layout.page_size
        rows = min(_WARM_UP_ROWS, size)
        batch = ragged_batch([np.zeros(1, np.uint32)], [0], [rows], size)
        every = torch.arange(rows)
        # Launches with room for few parts to merge, and for many.
        tried = [
            StepRows(None, (Launch(0, rows, int(spans)),), NO_BLOCKS) for spans in SPANS_STEPS[:3]
        ]
        tried.append(StepRows(None, (), self._blocks_of(np.array([0, rows], np.int64))))
        with torch.inference_mode():
            for split in tried:
                shape = exact_shape(batch, rows, len(split.blocks))
                words = torch.from_numpy(pack(shape, every, batch, every, split))
                made = unpack(shape, words.to(self._forward.device), split.launches)
                self.logits(self._forward.hidden(made, pool))
            self._forward.warm_up_merges()

    def prepare(self, pool: KvPool) -> None:
        """Capture the graphs of common steps over ``pool``, once: those over a later pool are
        captured on demand, since answers may be waiting for it."""
        self._use(pool)
        if self._graphs is None or self._is_prepared:
            return
        self._is_prepared = True
        began_s = time.monotonic()
        spans_max = -(-self.config.context_tokens_max // self._span_tokens)
        with torch.inference_mode():
            count = self._graphs.prepare(
                [one for one in common_buckets(self._graph_rows_max, spans_max)
                 if not one.chunk or self._is_light(one, one.rows)],
                seconds_max=PREPARE_S_MAX, now_s=time.monotonic,
            )  # fmt: skip
        _log.info(
            "worker.graphs_captured", graphs=count, seconds=round(time.monotonic() - began_s, 2)
        )

    def _split(self, batch: RaggedBatch) -> StepRows:
        return split_rows(
            batch,
            span_tokens=self._span_tokens,
            span_bytes=self._span_bytes,
            blocks_of=self._blocks_of,
        )

    def _blocks_of(self, starts: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        return row_blocks(starts, self.config.head_count // self.config.kv_head_count)

    def _use(self, pool: KvPool) -> None:
        """Run the next step over ``pool``. Graphs contain addresses of one memory, and are kept as
        long as it stays the same, also across a restart of the pager."""
        self._pool = weakref.ref(pool)
        before, self._memory = self._memory, _memory_of(pool)
        if self._side is None or before == self._memory:
            return
        self._graphs = None  # frees their memory before more is allocated
        pages = -(-self.config.context_tokens_max // pool.layout.page_size)
        self._table_pages_max = min(pages, pool.page_count)
        try:
            memory = GraphMemory(
                self._forward.device, self._side, rows_max=rows_held(self._graph_rows_max),
                table_pages_max=self._table_pages_max, block_rows=self._block_rows,
                hidden_size=self.config.hidden_size,
                vocab_tokens=self.config.vocab_tokens, dtype=self._forward.weights.embedding.dtype,
            )  # fmt: skip
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            warn_of_memory(0)
            return
        self._graphs = StepGraphs(lambda bucket: CapturedStep(bucket, self._body, memory))

    def _body(self, rows: DeviceRows, hidden: Tensor, logits: Tensor) -> None:
        pool = self._pool() if self._pool is not None else None
        assert pool is not None
        hidden.copy_(self._forward.hidden(rows, pool))
        logits.copy_(self._forward.weights.head(hidden))

    def _graph_of(
        self, batch: RaggedBatch, wanted_count: int, split: StepRows
    ) -> tuple[RowsShape, int, Step] | None:
        """The sections of a graph that holds a step, the row where prompts begin in it, and the
        graph; None when no bucket holds the step or none that does is captured."""
        if self._graphs is None or len(split.launches) > 1:
            return None
        alone = split.alone_count
        spans = split.launches[0].spans if alone else 1
        bucket = bucket_of(alone, spans, batch.rows - alone)
        if bucket is None or alone > self._graph_rows_max:
            return None
        pages = batch.tables.shape[0]

        def holds(bucket: Bucket) -> bool:
            return (
                max(batch.sequences, wanted_count) <= bucket.sequences
                and len(split.blocks) <= bucket.shape(pages, self._block_rows).blocks
                and pages <= bucket.sequences * self._table_pages_max
            )

        def may_stand_in(larger: Bucket) -> bool:
            return holds(larger) and self._is_light(larger, alone)

        if not holds(bucket) or (bucket.chunk and not self._is_light(bucket, alone)):
            return None
        found = self._graphs.step_for(bucket, may_stand_in)
        if found is None:
            return None
        held, captured = found
        return held.shape(pages, self._block_rows), held.rows, captured

    def _is_light(self, bucket: Bucket, alone: int) -> bool:
        """Whether ``bucket``, which may be for long contexts, is within the limits of a launch when
        ``alone`` rows attend by themselves."""
        return all(is_within_limits(one, alone, self._span_bytes) for one in bucket.launches)

    def _staged(self, words: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Tensor:
        """``words`` in memory from which a copy to the device is asynchronous."""
        staged = torch.from_numpy(words)
        return staged.pin_memory() if self._forward.device.type == "cuda" else staged


def _memory_of(pool: KvPool) -> tuple[object, ...]:
    """Equal for two pools for which kernels get the same constants and addresses."""
    return pool.address, pool.page_count, pool.layout
