"""``kv_write`` on a GPU: one program a row and KV head.

A slot below 0 is a row of padding and is skipped: a captured graph always runs all of its rows.
Slots beyond the pool are not looked for here, since the answer would be read after the damage
is done; ``ragged_batch`` makes them from page tables that were checked on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.triton_support import (
    PageShape,
    expect_heads,
    expect_integers,
    layer_elements,
    page_shape,
)


@triton.jit
def head_offset(slot, head, at: tl.constexpr):
    """Elements from the layer's start to the K of ``head`` in the page of ``slot``."""
    return (slot // at.page_size) * at.page_stride + head * at.head_stride


@triton.jit
def _write_heads(k, v, pages, slots, k_stride, v_stride, at: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    d = tl.arange(0, at.block_dim)
    kept = d < at.head_dim
    own = pages + head_offset(slot, head, at)
    place = slot % at.page_size
    k_row = tl.load(k + row * k_stride + head * at.head_dim + d, mask=kept).to(tl.float32)
    v_row = tl.load(v + row * v_stride + head * at.head_dim + d, mask=kept).to(tl.float32)
    tl.store(own + d * at.page_size + place, k_row, mask=kept)
    tl.store(own + at.value_offset + place * at.head_dim + d, v_row, mask=kept)


def kv_write(
    k: torch.Tensor, v: torch.Tensor, pool: KvPool, layer: int, slots: torch.Tensor
) -> None:
    """See the package; k and v may be float32, float16 or bfloat16. Raises ``ValueError``."""
    at: PageShape = page_shape(pool.layout)
    rows = slots.shape[0]
    expect_integers("slots", slots, torch.int64, rows)
    for name, given in (("k", k), ("v", v)):
        expect_heads(name, given, rows_count=rows, head_dim=at.head_dim)
        if given.shape[1] != at.kv_heads:
            raise ValueError(f"{name}: expected {at.kv_heads} heads, got {given.shape[1]}")
    if rows:
        _write_heads[(rows, at.kv_heads)](
            k, v, layer_elements(pool, layer), slots, k.stride(0), v.stride(0), at, num_warps=1
        )
