"""``kv_write``: new K and V rows into their pages.

k, v   float32 [rows, kv_heads, head_dim]; a row's heads contiguous, any row stride
pool   ``KvPool``; its slots ``slots`` of ``layer`` are MUTATED
slots  int64 [rows]: page * page_size + slot, no slot twice

Values are stored in the layout's dtype: float16, bfloat16, int8 and e4m3 round to nearest, ties to
even, the last two after division by one scale per row and head (``kv_codes``). Every CPU level of
the native library and the reference write the same bytes.

No other slot is touched. Raises ``IndexError`` for a slot outside of the pool, before any write.
"""

from __future__ import annotations

import torch

from pagemesh.kernels.dispatch import check_heads, is_native, native, threads
from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.kv_write import reference


def kv_write(
    k: torch.Tensor, v: torch.Tensor, pool: KvPool, layer: int, slots: torch.Tensor
) -> None:
    """See the module. Raises ``ValueError`` on a wrong shape, ``IndexError`` on a wrong slot."""
    at = pool.layout
    for name, rows in (("k", k), ("v", v)):
        check_heads(name, rows, rows_count=slots.shape[0], head_dim=at.head_dim)
        if rows.shape[1] != at.kv_heads:
            raise ValueError(f"{name}: expected {at.kv_heads} heads, got {rows.shape[1]}")
    if slots.dtype is not torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots: expected contiguous int64, got {slots.dtype}")
    if not is_native():
        reference.kv_write(k, v, pool, layer, slots)
        return
    bad = native().pm_kv_write(
        pool.structs[layer], k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0),
        slots.data_ptr(), slots.shape[0], threads(),
    )  # fmt: skip
    if bad:
        raise IndexError(f"slot {int(slots[bad - 1])} of row {bad - 1} is outside of the pool")
