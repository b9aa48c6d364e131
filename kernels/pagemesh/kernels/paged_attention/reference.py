"""``paged_attention`` in plain torch: one sequence after the other."""

from __future__ import annotations

import torch

from pagemesh.kernels.batch import RaggedBatch
from pagemesh.kernels.kv_pool import KvPool


def gather(pool: KvPool, layer: int, table: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """K and V of a sequence's first ``count`` positions: ``[kv_heads, count, head_dim]``."""
    at = pool.layout
    pages = table[: -(-count // at.page_size)].long()
    if len(pages) * at.page_size < count or bool(((pages < 0) | (pages >= pool.page_count)).any()):
        raise IndexError(f"no page in the pool for all of {count} positions")
    k = pool.keys(layer)[pages].permute(1, 0, 3, 2).reshape(at.kv_heads, -1, at.head_dim)
    v = pool.values(layer)[pages].permute(1, 0, 2, 3).reshape(at.kv_heads, -1, at.head_dim)
    return k[:, :count], v[:, :count]


def paged_attention(
    q: torch.Tensor, pool: KvPool, layer: int, batch: RaggedBatch, scale: float
) -> torch.Tensor:
    out = torch.empty(q.shape)
    group = q.shape[1] // pool.layout.kv_heads
    for sequence in range(batch.sequences):
        rows = (batch.row_sequence == sequence).nonzero().flatten()
        if not len(rows):
            continue
        positions = batch.row_position[rows]
        first, end = int(batch.table_indptr[sequence]), int(batch.table_indptr[sequence + 1])
        count = int(positions.max()) + 1
        k, v = gather(pool, layer, batch.tables[first:end], count)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = torch.einsum("rhd,hpd->hrp", q[rows], k) * scale
        hidden = torch.arange(count) > positions.unsqueeze(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hrp,hpd->rhd", weights, v)
    return out
