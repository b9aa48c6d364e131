"""Paged attention on a GPU: checked against float32 in plain torch, timed beside torch's own."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from ops.bench.gpu_rig import PAGE_SIZE, Item, Limits, Result, Rig, Tensor, difference, fill

from pagemesh.kernels.batch import WINDOW_TOKENS_MAX, RaggedBatch
from pagemesh.kernels.kv_codes import decode
from pagemesh.kernels.kv_write.reference import kv_write
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.ops import KvPool, ragged_batch
from pagemesh.kernels.paged_attention.tiles import Product, product_of
from pagemesh.kernels.paged_prefill.blocks import row_blocks, with_contexts

_ERROR_MAX: dict[Product, float] = {"half": 0.03, "tf32": 5e-3, "tf32x2": 1e-4, "tf32x3": 1e-4}
_SINK_QUERY, _SINK_SCORE = 4.0, 12.0
_ROUNDING = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 0.0}


@dataclass(frozen=True, slots=True)
class Case:
    """``rows`` of each sequence after ``past`` tokens; ``group``: query heads per KV head."""

    kind: Literal["decode", "prefill"]
    pages: KvDtype
    sequences: int
    past: int
    rows: int
    queries: torch.dtype = torch.bfloat16
    head_dim: int = 128
    group: int = 4
    window_tokens: int = WINDOW_TOKENS_MAX
    soft_cap: float = math.inf
    kv_heads: int = 8
    has_sink: bool = False
    """Every row attends to the first token more than to all others together, and V is small, so
    that the precision of small weights shows."""

    @property
    def name(self) -> str:
        parts = [f"{self.kind} attention {self.pages}"]
        if self.kind == "decode":
            parts.append(f"batch {self.sequences} context {self.context}")
        else:
            parts.append(f"past {self.past} rows {self.rows}")
            if self.sequences > 1:
                parts.append(f"batch {self.sequences}")
        if self.queries is not torch.bfloat16:
            parts.append(f"queries {str(self.queries).removeprefix('torch.')}")
        if self.head_dim != 128:
            parts.append(f"width {self.head_dim}")
        if self.group != 4:
            parts.append(f"group {self.group}")
        if self.window_tokens < WINDOW_TOKENS_MAX:
            parts.append(f"window {self.window_tokens}")
        if self.soft_cap < math.inf:
            parts.append(f"cap {self.soft_cap:.0f}")
        if self.has_sink:
            parts.append("sink")
        return " ".join(parts)

    @property
    def context(self) -> int:
        """Tokens of a sequence, including the new ones."""
        return self.past + self.rows

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def value_size(self) -> float:
        return 0.01 if self.has_sink else 1.0

    @property
    def seen(self) -> int:
        """Number of (row, position) pairs of one sequence within its window."""
        return sum(
            min(position + 1, self.window_tokens) for position in range(self.past, self.context)
        )

    @property
    def is_plain(self) -> bool:
        """Whether torch's attention supports the case."""
        return self.window_tokens >= WINDOW_TOKENS_MAX and math.isinf(self.soft_cap)

    def error_max(self, rig: Rig) -> float:
        """The larger error: of the products, or of rounding the result to the queries' type."""
        rounding = _ROUNDING[rig.half(self.queries)]
        return max(_ERROR_MAX[product_of(self.queries, self.pages)], rounding)

    def fitted(self, rig: Rig) -> Case:
        """The case, made smaller in a trial."""
        if not rig.is_trial:
            return self
        window = 20 if self.window_tokens < WINDOW_TOKENS_MAX else self.window_tokens
        return replace(
            self, sequences=min(self.sequences, 2), past=min(self.past, 30),
            rows=min(self.rows, 9), kv_heads=1, window_tokens=window,
        )  # fmt: skip


def cases() -> list[Case]:
    """Shapes of serving for each type of pages, then other types, widths, groups and limits."""
    found = []
    for pages in _PAGES:
        for batch, context in ((1, 8192), (8, 8192), (64, 1024), (256, 512)):
            found.append(Case("decode", pages, batch, context - 1, 1))
        for past, rows in ((0, 2048), (8192, 512)):
            found.append(Case("prefill", pages, 1, past, rows))
    for one in (
        Case("decode", "bfloat16", 8, 8191, 1),
        Case("prefill", "bfloat16", 1, 8192, 512),
    ):
        found += [
            replace(one, pages="float32", queries=torch.float32),
            replace(one, pages="float32"),
            replace(one, pages="int8", queries=torch.float32),
            replace(one, queries=torch.float32),
            replace(one, pages="float16", queries=torch.float16),
            replace(one, pages="int8", queries=torch.float16, has_sink=True),
            replace(one, pages="float32", queries=torch.float32, head_dim=64),
            replace(one, pages="float32", queries=torch.float32, head_dim=256),
            replace(one, head_dim=64),
            replace(one, head_dim=256),
            replace(one, group=1),
            replace(one, group=8),
            replace(one, window_tokens=1024),
            replace(one, soft_cap=30.0),
        ]
    found += [Case("prefill", "bfloat16", 1, past, 16) for past in (512, 8192)]
    found += [Case("prefill", "bfloat16", sequences, 8192, 64) for sequences in (1, 8)]
    return found


_PAGES: tuple[KvDtype, ...] = ("bfloat16", "int8", "e4m3")


def attention_items(rig: Rig) -> dict[str, Item]:
    """The items, by name."""
    return {case.name: _item(rig, case.fitted(rig)) for case in cases()}


class Attention:
    """A case that is set up once; each call computes it."""

    def __init__(self, rig: Rig, case: Case) -> None:
        from pagemesh.engine.cuda.launches import SPANS_STEPS
        from pagemesh.kernels.paged_attention.triton import span_count

        self._case = case
        self.pool, batch = filled(rig, case)
        self.batch = rig.placed(batch)
        self.q = rig.rows(batch.rows, case.heads, case.head_dim, dtype=case.queries)
        if case.has_sink:
            self.q[..., 0] = _SINK_QUERY
        blocks = with_contexts(
            row_blocks(batch.row_indptr.numpy(), case.group),
            batch.row_position.numpy(),
            batch.row_sequence.numpy(),
            batch.table_indptr.numpy(),
        )
        self._blocks = torch.from_numpy(blocks).to(self.q.device)
        # As many spans as steps use (``cuda.launches``).
        self._spans = int(SPANS_STEPS[np.searchsorted(SPANS_STEPS, span_count(case.context))])

    def __call__(self) -> Tensor:
        from pagemesh.kernels.paged_attention.triton import paged_attention
        from pagemesh.kernels.paged_prefill.triton import paged_prefill

        case = self._case
        if case.kind == "decode":
            return paged_attention(
                self.q, self.pool, 0, self.batch, case.scale, soft_cap=case.soft_cap,
                window_tokens=case.window_tokens, spans=self._spans,
            )  # fmt: skip
        return paged_prefill(
            self.q, self.pool, 0, self.batch, case.scale, soft_cap=case.soft_cap,
            window_tokens=case.window_tokens, blocks=self._blocks,
        )  # fmt: skip


def _item(rig: Rig, case: Case) -> Item:
    def run(best: Limits) -> Result:
        attend = Attention(rig, case)
        k, v = contiguous(attend.pool, attend.batch, case)
        error = difference(attend(), exact(case, attend.q, k, v))
        ms = rig.timed_ms(attend)
        beside_ms = 0.0
        if case.is_plain:
            by_torch = TorchAttention(case, attend.q, k, v)
            error = max(error, _apart(case, by_torch(), exact(case, attend.q, k, v)))
            beside_ms = rig.timed_ms(by_torch)
        read_tokens = case.sequences * min(case.context, case.window_tokens + case.rows - 1)
        flops = 4 * case.sequences * case.heads * case.head_dim * case.seen
        rate = best.float32_flops_per_s if case.queries is torch.float32 else best.flops_per_s
        return Result(
            error, case.error_max(rig), ms,
            read_tokens * attend.pool.layout.token_bytes / ms * 1e3 / best.bandwidth_bytes,
            flops / ms * 1e3 / rate, beside_ms,
        )  # fmt: skip

    return run


def filled(rig: Rig, case: Case) -> tuple[KvPool, RaggedBatch]:
    """A pool with K and V in every slot, and the batch, which is on the host."""
    each = -(-case.context // PAGE_SIZE)
    pool = rig.pool(
        case.pages, case.sequences * each, kv_heads=case.kv_heads, head_dim=case.head_dim
    )
    fill(rig, pool, 0, value_size=case.value_size)
    order = np.random.default_rng(0).permutation(pool.page_count).astype(np.uint32)
    tables = [order[i * each : (i + 1) * each] for i in range(case.sequences)]
    if case.has_sink:
        firsts = torch.tensor([int(table[0]) * PAGE_SIZE for table in tables], device=rig.device)
        v = rig.rows(len(firsts), case.kv_heads, case.head_dim).float() * case.value_size
        k = torch.zeros_like(v)
        k[..., 0] = _SINK_SCORE / (_SINK_QUERY * case.scale)
        kv_write(k, v, pool, 0, firsts)
    starts, counts = [case.past] * case.sequences, [case.rows] * case.sequences
    return pool, ragged_batch(tables, starts, counts, PAGE_SIZE)


def contiguous(pool: KvPool, batch: RaggedBatch, case: Case) -> tuple[Tensor, Tensor]:
    """K and V, float32 [sequences, kv_heads, context, head_dim], decoded and gathered."""
    pages = batch.tables.long().view(case.sequences, -1)
    k, v = pool.keys(0)[pages].transpose(3, 4), pool.values(0)[pages]
    key_scales = value_scales = None
    if pool.layout.is_scaled:
        key_scales, value_scales = pool.key_scales(0)[pages], pool.value_scales(0)[pages]
    joined = [
        decode(codes, scales).transpose(1, 2).flatten(2, 3)[:, :, : case.context].contiguous()
        for codes, scales in ((k, key_scales), (v, value_scales))
    ]
    return joined[0], joined[1]


def exact(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in float32, one KV head of a sequence at a time; float32 in the shape of ``q``."""
    own = q.float().view(case.sequences, case.rows, case.kv_heads, case.group, case.head_dim)
    out = torch.empty_like(own)
    position = torch.arange(case.past, case.context, device=q.device).unsqueeze(1)
    back = position - torch.arange(case.context, device=q.device)
    hidden = (back < 0) | (back >= case.window_tokens)
    for sequence in range(case.sequences):
        for head in range(case.kv_heads):
            rows = own[sequence, :, head]
            scores = torch.einsum("rgd,nd->grn", rows, k[sequence, head]) * case.scale
            if not math.isinf(case.soft_cap):
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[sequence, :, head] = torch.einsum("grn,nd->rgd", weights, v[sequence, head])
    return out.view(q.shape)


class TorchAttention:
    """torch's own attention over contiguous K and V, in the type of the queries.

    The causal mask is aligned to the lower right corner, and symbolic rather than a tensor, so that
    the flash kernel also accepts a chunk with a past. There is no flash kernel for float32, and the
    other kernel does not support shared heads: for it, K and V are repeated for each query head,
    outside the timed part.
    """

    def __init__(self, case: Case, q: Tensor, k: Tensor, v: Tensor) -> None:
        # Imported late: it loads Triton, which reads TRITON_INTERPRET at import.
        from torch.nn.attention.bias import causal_lower_right

        self._case = case
        by_head = q.view(case.sequences, case.rows, case.heads, case.head_dim).transpose(1, 2)
        self._q, self._k, self._v = by_head, k.to(q.dtype), v.to(q.dtype)
        self._shares = case.group > 1
        if self._shares and q.dtype is torch.float32:
            self._k, self._v = (x.repeat_interleave(case.group, 1) for x in (self._k, self._v))
            self._shares = False
        self._bias = causal_lower_right(case.rows, case.context) if case.rows > 1 else None

    def __call__(self) -> Tensor:
        case = self._case
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on why a kernel was not taken
            mixed = torch.nn.functional.scaled_dot_product_attention(
                self._q, self._k, self._v, attn_mask=self._bias, scale=case.scale,
                enable_gqa=self._shares,
            )  # fmt: skip
        return mixed.transpose(1, 2).reshape(-1, case.heads, case.head_dim)


def _apart(case: Case, by_torch: Tensor, expected: Tensor) -> float:
    """0 if torch computes the same as we do, else infinite: its time then says nothing."""
    bound = 1e-3 if case.queries is torch.float32 else 0.03
    return 0.0 if difference(by_torch, expected) <= bound else float("inf")
