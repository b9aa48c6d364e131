"""``kv_write`` on a GPU: one program per row and KV head.

A slot below 0 is a row of padding and is skipped: a captured graph always runs all of its rows.
Slots beyond the pool are not checked for here, since the host would learn of them only after the
damage is done; ``ragged_batch`` makes slots from page tables that were checked on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.quantise.triton import codes_of, largest_of, scale_of
from pagemesh.kernels.triton_support import (
    PageShape,
    elements_to_write,
    expect_heads,
    expect_integers,
    page_shape,
)


@triton.jit
def head_offset(slot, head, at: tl.constexpr):
    """Elements from the layer's start to the K of ``head`` in the page of ``slot``."""
    return (slot // at.page_size) * at.page_stride + head * at.head_stride


@triton.jit
def store_scale(codes, scale, place, at: tl.constexpr):
    """Store the scale of slot ``place``, after the ``codes`` of a head's K or V."""
    scales = (codes + at.scale_offset).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(scales + place, scale)


@triton.jit
def _write_heads(k, v, pages, slots, k_stride, v_stride, at: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    kind: tl.constexpr = at.kind
    d = tl.arange(0, at.block_dim)
    kept = d < at.head_dim
    keys = pages + head_offset(slot, head, at)
    values = keys + at.value_offset
    place = slot % at.page_size
    at_k, at_v = k + row * k_stride + head * at.head_dim, v + row * v_stride + head * at.head_dim
    k_row = tl.load(at_k + d, mask=kept, other=0.0).to(tl.float32)
    v_row = tl.load(at_v + d, mask=kept, other=0.0).to(tl.float32)
    if kind != "float":
        k_scale = scale_of(largest_of(k_row), kind)
        v_scale = scale_of(largest_of(v_row), kind)
        store_scale(keys, k_scale, place, at)
        store_scale(values, v_scale, place, at)
        tl.store(keys + d * at.page_size + place, codes_of(k_row, k_scale, kind), mask=kept)
        tl.store(values + place * at.head_dim + d, codes_of(v_row, v_scale, kind), mask=kept)
    else:
        tl.store(keys + d * at.page_size + place, k_row, mask=kept)
        tl.store(values + place * at.head_dim + d, v_row, mask=kept)


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
            k, v, elements_to_write(pool, layer), slots, k.stride(0), v.stride(0), at, num_warps=1
        )
