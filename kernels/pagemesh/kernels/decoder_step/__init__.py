"""``decoder_step``: a whole forward pass of a Llama-like decoder in one call.

With T rows, n of them wanted, and the widths of ``DecoderPlan``:

tokens   int64 [T]
batch    ``RaggedBatch`` of T rows
wanted   int64 [n], ascending: rows whose result is wanted
pool     ``KvPool``; the slots of all T rows are MUTATED in every layer
hidden   float32 [n, hidden], after the last norm; written, returned
logits   float32 [n, vocab]; written, returned; None when not asked for

What it computes, operation by operation, is defined in ``pagemesh.engine.forward``, and both agree
to the last bit. With ``row_invariant`` a row's bits do not depend on the other rows. One parallel
region covers the whole pass, so that threads are not started anew between operations and weights
can be prefetched across them. There is only a native one: the reference is that forward pass.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagemesh.kernels.batch import RaggedBatch
from pagemesh.kernels.decoder_step.run import NativeRun, RunDone, RunTerms
from pagemesh.kernels.dispatch import native, threads
from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.linear import PackedLinear
from pagemesh.kernels.linear.cpu import matrix_struct
from pagemesh.kernels.linear.packed import TYPE_OF
from pagemesh.kernels.native.library import (
    STEP_PHASES,
    DecoderStruct,
    LayerStruct,
    RowsStruct,
)
from pagemesh.kernels.weight_types import WEIGHT_TYPES

Tensor = torch.Tensor
_NONE: tuple[object, ...] = (None,) * 6
_TABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BAD = {
    1: "token {0} of row {1} is not in the vocabulary",
    2: "row {1} is beyond the last position of the model",
    3: "the slot of row {1} is outside of the pool",
    4: "wanted row {1} is not in the batch, or not after the one before it",
    5: "row {1} has no page in the pool for all of its past",
}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of a layer; ``query_norm`` and ``key_norm`` [head_dim] go together or are None."""

    attention_norm: Tensor
    qkv: PackedLinear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """A decoder as the library takes it. ``cosine`` and ``sine``: float32
    [positions, head_dim / 2]; ``embedding``: float32, bfloat16 or float16 [vocab, hidden]."""

    layers: Sequence[LayerWeights]
    embedding: Tensor
    norm: Tensor
    head: PackedLinear
    cosine: Tensor
    sine: Tensor
    head_count: int
    kv_head_count: int
    head_dim: int
    norm_epsilon: float
    attention_scale: float
    row_invariant: bool = False
    """Whether a row's bits must not depend on the other rows; see ``kernels.linear``."""


class DecoderStep:
    """A plan that is ready to run, with memory that steps reuse. One thread at a time."""

    def __init__(self, plan: DecoderPlan) -> None:
        self._plan = plan
        for tensor in (plan.norm, plan.cosine, plan.sine):
            if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
                raise ValueError("norm and rotation tables: expected float32, dense")
        if plan.embedding.dtype not in _TABLE_DTYPES or not plan.embedding.is_contiguous():
            raise ValueError(
                f"embedding: expected float32, bfloat16 or float16, dense; got "
                f"{plan.embedding.dtype}, strides {plan.embedding.stride()}"
            )
        matrices = [
            matrix
            for layer in plan.layers
            for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        if any(matrix.rounds_rows != plan.head.rounds_rows for matrix in matrices):
            raise ValueError("rounds_rows: expected the same of all matrices")
        self._layers = (LayerStruct * len(plan.layers))(*map(_layer, plan.layers))
        self._struct = _decoder(plan, self._layers)
        self._decoder = ctypes.byref(self._struct)
        self._workspace = torch.empty(0)
        self._workspace_of = (0, 0)
        self._workspace_at = 0
        self._out = torch.empty(0)
        self._inputs: tuple[object, ...] = _NONE
        self._arguments: tuple[object, ...] = ()
        self._results: tuple[Tensor, Tensor | None] = (self._out, None)

    def __call__(
        self,
        tokens: Tensor,
        batch: RaggedBatch,
        wanted: Tensor,
        pool: KvPool,
        *,
        logits: bool,
        phase_us: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``hidden`` and ``logits``, which the next call overwrites.

        ``phase_us``: float64 [3], to which the microseconds in matrix products, attention and
        other row operations are added. Raises ``ValueError`` on a wrong shape, ``IndexError``
        for a token, position, slot or page out of range; nothing is written then.
        """
        # Not the pool itself: a reference to it would keep its memory mapped.
        thread_count = threads()
        inputs = (tokens, batch, wanted, pool.layer_pointers, logits, thread_count)
        # A batch that continues is made of the same objects with other numbers in them.
        if not all(map(operator.is_, inputs, self._inputs)):
            self._prepare(
                tokens, batch, wanted, pool, logits=logits, thread_count=thread_count,
                rows_max=batch.rows,
            )  # fmt: skip
            self._inputs = inputs
        hidden, scores = self._results
        bad = native().pm_decoder_step(
            *self._arguments, None if phase_us is None else phase_us.data_ptr(), thread_count
        )
        if bad:
            raise _refusal(bad, tokens)
        return hidden, scores

    def run(
        self, tokens: Tensor, batch: RaggedBatch, wanted: Tensor, pool: KvPool, terms: RunTerms
    ) -> RunDone:
        """Several successive steps, see ``decoder_step.run``. Row i is a token of sequence i, and
        wanted. Raises like a step."""
        rows, thread_count = batch.rows, threads()
        if not rows == batch.sequences == len(wanted):
            raise ValueError(f"a run takes one wanted token a sequence, got {rows} tokens")
        run = NativeRun(terms, rows, self._plan.embedding.shape[0])
        inputs = (tokens, batch, wanted, pool.layer_pointers, run.rows_max, thread_count)
        if not all(map(operator.is_, inputs, self._inputs)):
            self._prepare(
                tokens, batch, wanted, pool, logits=True, thread_count=thread_count,
                rows_max=run.rows_max,
            )  # fmt: skip
            self._inputs = inputs
        hidden, logits = self._results
        assert logits is not None
        struct = run.struct(
            ctypes.addressof(self._struct), ctypes.addressof(pool.layer_pointers),
            ctypes.addressof(self._rows),
            (self._workspace_at, hidden.data_ptr(), logits.data_ptr()),
        )  # fmt: skip
        done = native().pm_decoder_run(ctypes.byref(struct), thread_count)
        if done < 0:
            raise _refusal(-done, tokens)
        return run.done(done)

    def _prepare(
        self,
        tokens: Tensor,
        batch: RaggedBatch,
        wanted: Tensor,
        pool: KvPool,
        *,
        logits: bool,
        thread_count: int,
        rows_max: int,
    ) -> None:
        """``rows_max``: the most rows of a step, which may have more than ``batch``."""
        self._inputs = _NONE  # if this fails, what was prepared before may be gone
        self._check(tokens, batch, wanted, pool)
        self._rows = RowsStruct(
            tokens.data_ptr(), batch.slots.data_ptr(), batch.row_sequence.data_ptr(),
            batch.row_position.data_ptr(), batch.tables.data_ptr(),
            batch.table_indptr.data_ptr(), wanted.data_ptr(),
            batch.rows, batch.sequences, wanted.shape[0],
        )  # fmt: skip
        workspace = self._workspace_at = self._reserve(rows_max, thread_count)
        count = wanted.shape[0] + rows_max - batch.rows
        hidden, scores = self._results = self._make_results(count, logits)
        self._arguments = (
            self._decoder, pool.layer_pointers, ctypes.byref(self._rows), workspace,
            hidden.data_ptr(), None if scores is None else scores.data_ptr(),
        )  # fmt: skip

    def _check(self, tokens: Tensor, batch: RaggedBatch, wanted: Tensor, pool: KvPool) -> None:
        for name, indices in (("tokens", tokens), ("wanted", wanted), ("slots", batch.slots)):
            if indices.dtype is not torch.int64 or not indices.is_contiguous():
                raise ValueError(f"{name}: expected contiguous int64, got {indices.dtype}")
        if tokens.shape[0] != batch.rows or batch.slots.shape[0] != batch.rows:
            raise ValueError(f"tokens: expected {batch.rows}, got {tokens.shape[0]}")
        plan, at = self._plan, pool.layout
        expected = (len(plan.layers), plan.kv_head_count, plan.head_dim)
        if (at.layers, at.kv_heads, at.head_dim) != expected:
            raise ValueError(
                f"pool: expected (layers, kv_heads, head_dim) {expected}, got "
                f"{(at.layers, at.kv_heads, at.head_dim)}"
            )

    def _reserve(self, rows: int, thread_count: int) -> int:
        """The address of a workspace for ``rows`` rows; it only shrinks when the number of threads
        changes."""
        if rows > self._workspace_of[0] or thread_count != self._workspace_of[1]:
            size = native().pm_decoder_workspace(self._decoder, rows, thread_count)
            self._workspace = torch.empty(size + 16)
            self._workspace_of = (rows, thread_count)  # only once it is allocated
        address = self._workspace.data_ptr()
        return address + -address % 64

    def _make_results(self, count: int, logits: bool) -> tuple[Tensor, Tensor | None]:
        hidden_size, vocab = self._plan.norm.shape[0], self._plan.head.n
        hidden_floats = -(-count * hidden_size // 16) * 16
        size = hidden_floats + (count * vocab if logits else 0)
        if size > self._out.shape[0]:
            self._out = torch.empty(size)
        hidden = self._out[: count * hidden_size].view(count, hidden_size)
        if not logits:
            return hidden, None
        return hidden, self._out[hidden_floats:size].view(count, vocab)


def _refusal(bad: int, tokens: Tensor) -> IndexError:
    row = bad & 0xFFFF_FFFF
    token = int(tokens[row]) if bad >> 32 == 1 else 0
    return IndexError(_BAD[bad >> 32].format(token, row))


def phases() -> Tensor:
    """Zeros for ``phase_us``: matrix products, attention, other row operations."""
    return torch.zeros(STEP_PHASES, dtype=torch.float64)


def _layer(layer: LayerWeights) -> LayerStruct:
    head_norms = [
        None if norm is None else norm.data_ptr() for norm in (layer.query_norm, layer.key_norm)
    ]
    return LayerStruct(
        layer.attention_norm.data_ptr(),
        *head_norms,
        layer.mlp_norm.data_ptr(),
        *map(matrix_struct, (layer.qkv, layer.output, layer.gate_up, layer.down)),
    )


def _decoder(plan: DecoderPlan, layers: ctypes.Array[LayerStruct]) -> DecoderStruct:
    vocab, hidden = plan.embedding.shape
    return DecoderStruct(
        ctypes.addressof(layers), plan.embedding.data_ptr(), plan.norm.data_ptr(),
        plan.cosine.data_ptr(), plan.sine.data_ptr(), matrix_struct(plan.head),
        len(plan.layers), hidden, plan.head_count, plan.kv_head_count, plan.head_dim,
        plan.layers[0].down.k, vocab, plan.cosine.shape[0],
        plan.norm_epsilon, plan.attention_scale, plan.row_invariant,
        WEIGHT_TYPES.index(TYPE_OF[plan.embedding.dtype]),
    )  # fmt: skip
