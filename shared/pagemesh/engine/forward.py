"""The forward pass of the lean families over ragged rows and paged K and V.

One definition for all of ``coverage.LEAN``, for prompt chunks and for single tokens. With T
rows (tokens) and the widths of ``DecoderConfig``:

    x [T, hidden] = embedding[tokens]
    for each layer:
        qkv [T, query + 2 kv] = norm(x) @ qkv.T (+ bias)   q, k normalised by head (Qwen3)
        q, k rotated by their positions; k, v written to their pages
        x += attention(q, pages) @ output.T
        x += silu(gate) * up @ down.T                      gate, up = norm(x) @ gate_up.T
    logits [n, vocab] = norm(x[wanted]) @ head.T

The bits of a row do not depend on the other rows, with two exceptions: torch's attention, which
long chunks use, and ``linear`` on machines with matrix tiles (AMX), where many rows are multiplied
on tiles and few rows are not. Deterministic mode does without the first, and multiplies all rows on
tiles.

``Decoder.hidden`` and ``Decoder.logits`` are this definition, one operation at a time.
``Decoder.step`` computes the same bits in one native call where that is available.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pagemesh.engine.model import DecoderConfig, Rope
from pagemesh.engine.weights import DecoderWeights
from pagemesh.kernels.dispatch import Backend
from pagemesh.kernels.ops import (
    DecoderPlan,
    DecoderStep,
    KvPool,
    LayerWeights,
    PackedLinear,
    RaggedBatch,
    backend,
    kv_write,
    linear,
    paged_attention,
    paged_prefill,
    rms_norm,
    rope,
    silu_mul,
)
from pagemesh.kernels.paged_prefill import ROWS_MIN, torch_is_quicker

Tensor = torch.Tensor
_POSITIONS_BLOCK = 4096
"""Positions whose angles are held in double precision at a time."""


class Decoder:
    """Weights and the order in which to use them. Holds no sequence and no page."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, *, deterministic: bool
    ) -> None:
        self.config = config
        self.weights = weights
        self.deterministic = deterministic
        self._cosine, self._sine = rotation_tables(config.rope, config.context_tokens_max)
        self._whole = DecoderStep(self._plan()) if backend() is Backend.NATIVE else None
        self.run = self._whole.run if self._whole is not None else None

    def step(
        self,
        tokens: Tensor,
        batch: RaggedBatch,
        wanted: Tensor,
        pool: KvPool,
        *,
        logits: bool,
        phase_us: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``hidden`` and, when asked for, ``logits`` of the rows ``wanted``; the next step
        overwrites both. ``phase_us``: see ``kernels.decoder_step``; a step that is computed one
        operation at a time adds nothing to it. Raises like ``hidden``."""
        if self._whole is not None and not self._is_for_torch(batch):
            return self._whole(tokens, batch, wanted, pool, logits=logits, phase_us=phase_us)
        hidden = self.hidden(tokens, batch, wanted, pool)
        return hidden, self.logits(hidden) if logits else None

    def hidden(self, tokens: Tensor, batch: RaggedBatch, wanted: Tensor, pool: KvPool) -> Tensor:
        """float32 [n, hidden], ready for ``logits``, of the rows ``wanted`` (int64 [n],
        ascending). ``tokens``: int64 [T]. Writes K and V of all T rows to ``pool``.

        Raises ``IndexError`` for a token, position or page out of range.
        """
        cosine = self._cosine[batch.row_position]
        sine = self._sine[batch.row_position]
        x = self.weights.embedding[tokens].float()
        work = Workspace(self.config, batch.rows)
        attention = paged_prefill if self._is_for_torch(batch) else paged_attention
        last = self.config.layer_count - 1
        for index, layer in enumerate(self.weights.layers):
            q = self._write_kv(index, layer, x, work, (cosine, sine), batch, pool)
            if index == last and len(wanted) < batch.rows:
                # Once the last layer's K and V are written, only the wanted rows matter.
                x, q, batch = x[wanted], q[wanted], narrowed(batch, wanted)
                work, attention = Workspace(self.config, batch.rows), paged_attention
            attention(q, pool, index, batch, self.config.attention_scale, work.mixed)
            x += self._linear(work.mixed_rows, layer.output, work.hidden)
            x += self._gated(layer, x, work)
        return rms_norm(x, self.weights.norm, self.config.norm_epsilon)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab] of ``hidden`` rows."""
        return self._linear(hidden, self.weights.head)

    def _linear(self, x: Tensor, packed: PackedLinear, out: Tensor | None = None) -> Tensor:
        return linear(x, packed, out, row_invariant=self.deterministic)

    def _is_for_torch(self, batch: RaggedBatch) -> bool:
        """Whether chunks are so long that torch's attention is faster."""
        if self.deterministic or batch.rows < ROWS_MIN * batch.sequences or not batch.rows:
            return False
        return torch_is_quicker()

    def _plan(self) -> DecoderPlan:
        config, weights = self.config, self.weights
        return DecoderPlan(
            layers=weights.layers, embedding=weights.embedding, norm=weights.norm,
            head=weights.head, cosine=self._cosine, sine=self._sine,
            head_count=config.head_count, kv_head_count=config.kv_head_count,
            head_dim=config.head_dim, norm_epsilon=config.norm_epsilon,
            attention_scale=config.attention_scale, row_invariant=self.deterministic,
        )  # fmt: skip

    def _write_kv(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        work: Workspace,
        angles: tuple[Tensor, Tensor],
        batch: RaggedBatch,
        pool: KvPool,
    ) -> Tensor:
        """Write K and V of every row; returns the rotated queries, [T, heads, head_dim]."""
        normed = rms_norm(x, layer.attention_norm, self.config.norm_epsilon, work.hidden)
        self._linear(normed, layer.qkv, work.joined)
        q, k = work.q, work.k
        if layer.query_norm is None or layer.key_norm is None:
            rope(work.turned, *angles)
        else:
            q, k = self._norm_heads(q, layer.query_norm), self._norm_heads(k, layer.key_norm)
            rope(q, *angles)
            rope(k, *angles)
        kv_write(k, work.v, pool, index, batch.slots)
        return q

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> Tensor:
        flat = heads.reshape(-1, self.config.head_dim)
        return rms_norm(flat, weight, self.config.norm_epsilon).view(heads.shape)

    def _gated(self, layer: LayerWeights, x: Tensor, work: Workspace) -> Tensor:
        normed = rms_norm(x, layer.mlp_norm, self.config.norm_epsilon, work.hidden)
        self._linear(normed, layer.gate_up, work.gate_up)
        return self._linear(silu_mul(work.gate_up, work.gated), layer.down, work.hidden)


class Workspace:
    """Intermediate results of a layer, for T rows: allocated once per step, since every layer
    overwrites those of the previous one.

    ``hidden`` [T, hidden]; ``joined`` [T, query + 2 kv] and views of its heads, ``q``, ``k``, ``v``
    and ``turned`` (q and k); ``mixed`` [T, heads, head_dim] and its view as rows, ``mixed_rows``;
    ``gate_up`` [T, 2 mlp]; ``gated`` [T, mlp].
    """

    __slots__ = (
        "gate_up", "gated", "hidden", "joined", "k", "mixed", "mixed_rows", "q", "turned", "v",
    )  # fmt: skip

    def __init__(self, config: DecoderConfig, rows: int) -> None:
        turned_count = config.head_count + config.kv_head_count
        self.hidden = torch.empty(rows, config.hidden_size)
        self.joined = torch.empty(rows, config.query_size + 2 * config.kv_size)
        heads = self.joined.view(rows, turned_count + config.kv_head_count, config.head_dim)
        self.turned, self.v = heads[:, :turned_count], heads[:, turned_count:]
        self.q, self.k = heads[:, : config.head_count], heads[:, config.head_count : turned_count]
        self.mixed_rows = torch.empty(rows, config.query_size)
        self.mixed = self.mixed_rows.view(rows, config.head_count, config.head_dim)
        self.gate_up = torch.empty(rows, 2 * config.mlp_size)
        self.gated = torch.empty(rows, config.mlp_size)


def narrowed(batch: RaggedBatch, wanted: Tensor) -> RaggedBatch:
    """``batch`` with only its rows ``wanted`` (int64 [n], ascending), of the same sequences."""
    return replace(
        batch,
        row_indptr=torch.searchsorted(wanted, batch.row_indptr.long()).int(),
        row_sequence=batch.row_sequence[wanted],
        row_position=batch.row_position[wanted],
        slots=batch.slots[wanted],
    )


def rotation_tables(rope_of: Rope, position_count: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [positions, pairs].

    The angle is a float32 product, as in training: the rounding of large angles is part of the
    model. Its cosine and sine are taken in double precision, so that no library's rounding shows.
    """
    frequencies = np.array(rope_of.frequencies, np.float32)
    shape = (position_count, len(frequencies))
    cosine, sine = np.empty(shape, np.float32), np.empty(shape, np.float32)
    positions = np.arange(position_count, dtype=np.float32)[:, None]
    for start in range(0, position_count, _POSITIONS_BLOCK):
        part = slice(start, start + _POSITIONS_BLOCK)
        angles = (positions[part] * frequencies).astype(np.float64)
        cosine[part] = np.cos(angles) * rope_of.scale
        sine[part] = np.sin(angles) * rope_of.scale
    return torch.from_numpy(cosine), torch.from_numpy(sine)
