"""A model on a device, with the interface of ``engine.forward.Decoder``.

What comes in is on the host; hidden states and logits that come out stay on the device, where
tokens are drawn (``cuda.sampler``). Nothing here waits for it.
"""

from __future__ import annotations

import numpy as np
import torch

from pagemesh.engine.cuda.forward import DeviceForward
from pagemesh.engine.cuda.graphs import DecodeGraphs, bucket_of
from pagemesh.engine.cuda.rows import DeviceRows, exact_shape, pack, unpack
from pagemesh.engine.cuda.weights import DeviceWeights
from pagemesh.engine.model import DecoderConfig
from pagemesh.kernels.ops import KvPool, RaggedBatch

Tensor = torch.Tensor
_CHUNK_ROWS_MIN = 4
"""Rows a sequence, on average, from which attention goes by blocks of rows: below that its
tiles would be mostly empty, and each row on its own keeps more of the device busy."""


class CudaDecoder:
    """One thread at a time, like the CPU's."""

    def __init__(self, config: DecoderConfig, weights: DeviceWeights, *, with_graphs: bool) -> None:
        """``with_graphs``: decode steps are captured; needs a CUDA device."""
        from pagemesh.kernels.paged_attention.triton import span_count
        from pagemesh.kernels.paged_prefill.triton import row_blocks

        self._span_count, self._row_blocks = span_count, row_blocks
        self.config = config
        self._forward = DeviceForward(config, weights)
        self._with_graphs = with_graphs
        self._graphs: DecodeGraphs | None = None
        self._pool: KvPool | None = None

    run = None

    def step(
        self, tokens: Tensor, batch: RaggedBatch, wanted: Tensor, pool: KvPool, *, logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states and, when asked for, float32 logits of the rows ``wanted`` (int64 [n],
        ascending); the next step may overwrite both. ``tokens``: int64 [T], on the host like
        ``batch``. Writes K and V of all T rows to ``pool``."""
        self._use(pool)
        position = batch.row_position
        chunked = batch.rows >= _CHUNK_ROWS_MIN * batch.sequences
        spans = 0 if chunked else self._span_count(int(position.max()) + 1)
        if logits and spans and batch.rows == batch.sequences == len(wanted):
            replayed = self._replay(tokens, batch, wanted, spans)
            if replayed is not None:
                return replayed
        group = self.config.head_count // self.config.kv_head_count
        blocks = np.empty((0, 2), np.int32)
        if chunked:
            blocks = self._row_blocks(batch.row_indptr.numpy(), group)
        shape = exact_shape(batch, len(wanted), len(blocks))
        words = self._staged(pack(shape, tokens, batch, wanted, blocks))
        rows = unpack(shape, words.to(self._forward.device, non_blocking=True))
        hidden = self._forward.hidden(rows, pool, spans)
        return hidden, self.logits(hidden) if logits else None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of ``hidden`` rows."""
        return self._forward.logits(hidden)

    def _use(self, pool: KvPool) -> None:
        """Graphs name the addresses of one memory, which a pager that was restarted serves on."""
        before, self._pool = self._pool, pool
        if before is None or not _is_same_memory(before, pool):
            self._graphs = None
            if self._with_graphs:
                self._graphs = DecodeGraphs(self._body, self._forward.device)

    def _body(self, rows: DeviceRows, spans: int) -> tuple[Tensor, Tensor]:
        assert self._pool is not None
        hidden = self._forward.hidden(rows, self._pool, spans)
        return hidden, self._forward.logits(hidden)

    def _replay(
        self, tokens: Tensor, batch: RaggedBatch, wanted: Tensor, spans: int
    ) -> tuple[Tensor, Tensor] | None:
        bucket = bucket_of(batch.rows, spans, batch.tables.shape[0])
        captured = self._graphs.step_for(bucket) if self._graphs and bucket else None
        if captured is None or bucket is None:
            return None
        words = pack(bucket.shape, tokens, batch, wanted, np.empty((0, 2), np.int32))
        return captured(self._staged(words), batch.rows)

    def _staged(self, words: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Tensor:
        """``words`` where a copy to the device does not wait for the host."""
        staged = torch.from_numpy(words)
        return staged.pin_memory() if self._forward.device.type == "cuda" else staged


def _is_same_memory(left: KvPool, right: KvPool) -> bool:
    """Whether kernels would get the same constants and addresses for both."""
    return (left.address, left.page_count, left.layout) == (
        right.address,
        right.page_count,
        right.layout,
    )
