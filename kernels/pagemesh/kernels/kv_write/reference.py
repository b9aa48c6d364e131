"""``kv_write`` in plain torch."""

from __future__ import annotations

import torch

from pagemesh.kernels.kv_codes import encode
from pagemesh.kernels.kv_pool import KvPool


def kv_write(
    k: torch.Tensor, v: torch.Tensor, pool: KvPool, layer: int, slots: torch.Tensor
) -> None:
    size = pool.layout.page_size
    wrong = torch.nonzero((slots < 0) | (slots >= pool.page_count * size))
    if len(wrong):
        row = int(wrong[0])
        raise IndexError(f"slot {int(slots[row])} of row {row} is outside of the pool")
    pages, offsets = slots // size, slots % size
    key_codes, key_scales = encode(k, pool.layout.dtype)
    value_codes, value_scales = encode(v, pool.layout.dtype)
    pool.keys(layer)[pages, :, :, offsets] = key_codes
    pool.values(layer)[pages, :, offsets, :] = value_codes
    if key_scales is not None and value_scales is not None:
        pool.key_scales(layer)[pages, :, offsets] = key_scales
        pool.value_scales(layer)[pages, :, offsets] = value_scales
