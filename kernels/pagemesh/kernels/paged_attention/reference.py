"""``paged_attention`` in plain torch: one sequence after the other."""

from __future__ import annotations

import math

import torch

from pagemesh.kernels.batch import WINDOW_TOKENS_MAX, RaggedBatch
from pagemesh.kernels.kv_codes import decode
from pagemesh.kernels.kv_pool import KvPool


def gather(
    pool: KvPool, layer: int, table: torch.Tensor, end: int, *, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a sequence's positions ``first`` to ``end`` (exclusive): float32
    ``[kv_heads, end - first, head_dim]``. Raises ``IndexError``."""
    at = pool.layout
    page = first // at.page_size
    pages = table[page : -(-end // at.page_size)].long()
    held = (page + len(pages)) * at.page_size
    if held < end or bool(((pages < 0) | (pages >= pool.page_count)).any()):
        raise IndexError(f"no page in the pool for all of {end} positions")
    k = _joined(pool.keys(layer)[pages].transpose(2, 3))
    v = _joined(pool.values(layer)[pages])
    key_scales = value_scales = None
    if at.is_scaled:
        key_scales = _joined(pool.key_scales(layer)[pages])
        value_scales = _joined(pool.value_scales(layer)[pages])
    own = slice(first - page * at.page_size, end - page * at.page_size)
    return decode(k, key_scales)[:, own], decode(v, value_scales)[:, own]


def _joined(pages: torch.Tensor) -> torch.Tensor:
    """``[pages, kv_heads, page_size, ...]`` as ``[kv_heads, slots, ...]``."""
    return pages.transpose(0, 1).flatten(1, 2)


def paged_attention(
    q: torch.Tensor,
    pool: KvPool,
    layer: int,
    batch: RaggedBatch,
    scale: float,
    *,
    soft_cap: float = math.inf,
    window_tokens: int = WINDOW_TOKENS_MAX,
) -> torch.Tensor:
    out = torch.empty(q.shape)
    group = q.shape[1] // pool.layout.kv_heads
    for sequence in range(batch.sequences):
        rows = (batch.row_sequence == sequence).nonzero().flatten()
        if not len(rows):
            continue
        positions = batch.row_position[rows].long()
        table = batch.tables[slice(*batch.table_indptr[sequence : sequence + 2].tolist())]
        end = int(positions.max()) + 1
        first = max(0, int(positions.min()) + 1 - window_tokens)
        k, v = gather(pool, layer, table, end, first=first)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = torch.einsum("rhd,hpd->hrp", q[rows], k) * scale
        if soft_cap < math.inf:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        back = positions.unsqueeze(1) - torch.arange(first, end)
        hidden = (back < 0) | (back >= window_tokens)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hrp,hpd->rhd", weights, v)
    return out
