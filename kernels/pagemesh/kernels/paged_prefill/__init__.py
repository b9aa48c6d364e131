"""``paged_prefill``: the same as ``paged_attention``, but long chunks go to torch's attention where
our own has no vector instructions.

Same arguments and result, but rows of a sequence must be consecutive positions, and the last
bits depend on the chunking: not for deterministic mode. For such a chunk K and V are gathered
from their pages; the past is attended to without a mask, the chunk causally, and the two are
merged by their log-sum-exp (base e), as in cascade attention (Ye et al., 2024). Without vectors
our own kernel takes several times as long as torch's; with AVX2 it takes as long or less, with
AVX-512 less than half as long (``ops/bench/results/kernels_portable.json``,
``kernels_avx2.json``, ``kernels.json``).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pagemesh.kernels.batch import RaggedBatch
from pagemesh.kernels.dispatch import is_native, native, threads
from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.native.library import CpuLevel, cpu_level
from pagemesh.kernels.paged_attention import check_shapes, paged_attention
from pagemesh.kernels.paged_attention.reference import gather as gather_reference

ROWS_MIN = 128


def torch_is_quicker() -> bool:
    """Whether torch's attention is faster for chunks of ``ROWS_MIN`` rows or more."""
    return not is_native() or cpu_level() is CpuLevel.PORTABLE


def paged_prefill(
    q: torch.Tensor,
    pool: KvPool,
    layer: int,
    batch: RaggedBatch,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the module. Raises like ``paged_attention``."""
    if out is None:
        out = torch.empty(q.shape, dtype=torch.float32)
    if not torch_is_quicker():
        return paged_attention(q, pool, layer, batch, scale, out)
    check_shapes(q, pool, batch, out)
    row_indptr, table_indptr = batch.row_indptr.tolist(), batch.table_indptr.tolist()
    for sequence in range(batch.sequences):
        low, high = row_indptr[sequence], row_indptr[sequence + 1]
        if low == high:
            continue
        if high - low < ROWS_MIN:
            part = _rows_of(batch, low, high)
            paged_attention(q[low:high], pool, layer, part, scale, out[low:high])
            continue
        table = batch.tables[table_indptr[sequence] : table_indptr[sequence + 1]]
        start = int(batch.row_position[low])
        out[low:high] = by_torch(q[low:high], pool, layer, table, start, scale)
    return out


def by_torch(
    q: torch.Tensor,
    pool: KvPool,
    layer: int,
    table: torch.Tensor,
    start: int,
    scale: float,
) -> torch.Tensor:
    """One sequence through torch: ``q`` ``[rows, heads, head_dim]`` at positions from ``start``
    on, ``table`` int32 its page table. Raises ``IndexError`` like ``paged_attention``."""
    k, v = _gather(pool, layer, table, start + len(q))
    return _attend(q, k, v, start, scale)


def _rows_of(batch: RaggedBatch, low: int, high: int) -> RaggedBatch:
    """Rows ``[low, high)``, of one sequence, with the same page tables."""
    return replace(
        batch,
        row_sequence=batch.row_sequence[low:high],
        row_position=batch.row_position[low:high],
        slots=batch.slots[low:high],
    )


def _gather(pool: KvPool, layer: int, table: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    if not is_native():
        return gather_reference(pool, layer, table, count)
    shape = (pool.layout.kv_heads, count, pool.layout.head_dim)
    k, v = torch.empty(shape), torch.empty(shape)
    bad = native().pm_kv_gather(
        pool.structs[layer], table.data_ptr(), table.shape[0], 0, count, k.data_ptr(),
        v.data_ptr(), threads(),
    )  # fmt: skip
    if bad:
        raise IndexError(f"no page in the pool for all of {count} positions")
    return k, v


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """One sequence: q ``[rows, heads, head_dim]``, k and v ``[kv_heads, start + rows, head_dim]``;
    returns ``[rows, heads, head_dim]``."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    by_head = q.transpose(0, 1).contiguous()
    own_k, own_v = (x[:, start:].repeat_interleave(group, 0) for x in (k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own, own_lse = flash(by_head[None], own_k[None], own_v[None], 0.0, True, scale=scale)
    recent: torch.Tensor = own[0]
    if start == 0:
        return recent.transpose(0, 1)
    # Without a mask the heads that share K and V are just more rows of one head.
    folded = by_head.view(1, kv_heads, group * rows, head_dim)
    past, past_lse = flash(folded, k[None, :, :start], v[None, :, :start], 0.0, False, scale=scale)
    past, past_lse = past.reshape(heads, rows, head_dim), past_lse.reshape(heads, rows)
    share = torch.sigmoid(past_lse - own_lse.reshape(heads, rows)).unsqueeze(-1)
    merged: torch.Tensor = torch.lerp(recent, past, share)
    return merged.transpose(0, 1)
