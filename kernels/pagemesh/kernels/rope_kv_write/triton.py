"""``rope_kv_write`` on a GPU: one program per row and head of q, k or v."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.kv_write.triton import head_offset, store_scale
from pagemesh.kernels.quantise.triton import codes_of, largest_of, scale_of
from pagemesh.kernels.rope.triton import turned
from pagemesh.kernels.triton_support import (
    PageShape,
    elements_to_write,
    expect_heads,
    expect_integers,
    expect_rows,
    page_shape,
)


@dataclass(frozen=True, slots=True)
class JoinedShape:
    """A compile-time constant: what a row of q, k and v looks like."""

    page: PageShape
    heads: int
    half: int
    block_half: int
    has_norms: bool


@triton.jit
def _store_head(codes, low, high, places, high_offset, place, kept, at: tl.constexpr):
    """Store the halves of a head of K or V, at ``places`` and ``high_offset`` beyond, and the scale
    that they share."""
    kind: tl.constexpr = at.kind
    if kind != "float":
        scale = scale_of(tl.maximum(largest_of(low), largest_of(high)), kind)
        store_scale(codes, scale, place, at)
        tl.store(codes + places, codes_of(low, scale, kind), mask=kept)
        tl.store(codes + places + high_offset, codes_of(high, scale, kind), mask=kept)
    else:
        tl.store(codes + places, low, mask=kept)
        tl.store(codes + places + high_offset, high, mask=kept)


@triton.jit
def _prepare_heads(
    joined, cosine, sine, query_norm, key_norm, pages, slots, row_stride, epsilon,
    at: tl.constexpr,
):  # fmt: skip
    page: tl.constexpr = at.page  # Triton 3.6 passes it on only under a name of its own
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    place = slot % page.page_size
    d = tl.arange(0, at.block_half)
    kept = d < at.half
    own = joined + row * row_stride + head * page.head_dim + d
    low = tl.load(own, mask=kept, other=0.0).to(tl.float32)
    high = tl.load(own + at.half, mask=kept, other=0.0).to(tl.float32)
    if head < at.heads + page.kv_heads:
        is_query = head < at.heads
        if at.has_norms:
            mean = tl.sum(low * low + high * high, 0) / page.head_dim
            weight = query_norm + d if is_query else key_norm + d
            factor = tl.rsqrt(mean + epsilon)
            low *= factor * tl.load(weight, mask=kept, other=0.0).to(tl.float32)
            high *= factor * tl.load(weight + at.half, mask=kept, other=0.0).to(tl.float32)
        c = tl.load(cosine + row * at.half + d, mask=kept, other=0.0)
        s = tl.load(sine + row * at.half + d, mask=kept, other=0.0)
        low, high = turned(low, high, c, s)
        if is_query:
            tl.store(own, low, mask=kept)
            tl.store(own + at.half, high, mask=kept)
        elif slot >= 0:
            k = pages + head_offset(slot, head - at.heads, page)
            places = place + d * page.page_size
            _store_head(k, low, high, places, at.half * page.page_size, place, kept, page)
    elif slot >= 0:
        v = pages + head_offset(slot, head - at.heads - page.kv_heads, page)
        v += page.value_offset
        _store_head(v, low, high, place * page.head_dim + d, at.half, place, kept, page)


def rope_kv_write(
    joined: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    pool: KvPool,
    layer: int,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 0.0,
) -> None:
    """See the package: ``angles`` are cosine and sine, ``norms`` the weights of query and key.
    Raises ``ValueError`` on a wrong shape or an odd head width."""
    page = page_shape(pool.layout)
    rows, half = slots.shape[0], page.head_dim // 2
    heads = joined.shape[1] - 2 * page.kv_heads
    expect_heads("joined", joined, rows_count=rows, head_dim=page.head_dim)
    expect_integers("slots", slots, torch.int64, rows)
    if heads < 1 or page.head_dim % 2:
        raise ValueError(f"{heads} query heads of width {page.head_dim} cannot be rotated")
    for name, table in zip(("cosine", "sine"), angles, strict=True):
        expect_rows(name, table, width=half)
    if not rows:
        return
    query_norm, key_norm = norms if norms is not None else angles  # not read without norms
    at = JoinedShape(page, heads, half, triton.next_power_of_2(half), norms is not None)
    _prepare_heads[(rows, joined.shape[1])](
        joined, *angles, query_norm, key_norm, elements_to_write(pool, layer), slots,
        joined.stride(0), epsilon, at, num_warps=1,
    )  # fmt: skip
