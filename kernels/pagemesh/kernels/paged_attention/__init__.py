"""``paged_attention``: every row attends to its own past through its page table.

    out[r, h] = softmax over p of cap(q[r, h] . K[p] * scale)  applied to V[p]
                for p with position(r) - window_tokens < p <= position(r)

q      float32 [rows, heads, head_dim], heads a multiple of kv_heads; query heads
       ``g * heads / kv_heads ...`` share KV head g; a row's heads contiguous, any row stride
pool   ``KvPool`` of any dtype; K and V of all positions each row sees are in its pages; codes
       and scales become float32 in registers
batch  ``RaggedBatch``; page-table entries before the first position that a row sees are not read
scale  multiplies the scores (usually ``head_dim ** -0.5``); exponentials are base e
out    float32 [rows, heads, head_dim], contiguous heads; written, returned
soft_cap       cap(x) = soft_cap * tanh(x / soft_cap); infinite: cap(x) = x
window_tokens  the most positions that a row sees, its own included; at least 1

The native kernel is row-invariant to the last bit (whatever the batch, the chunking and the
threads). It takes the context in spans of 512 positions, with an online softmax over blocks of 64
(Milakov and Gimelshein, 2018; splitting the context as in Flash-Decoding, Dao et al., 2023).
"""

from __future__ import annotations

import math

import torch

from pagemesh.kernels.batch import WINDOW_TOKENS_MAX, RaggedBatch
from pagemesh.kernels.dispatch import check_heads, is_native, native, threads
from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.paged_attention import reference


def paged_attention(
    q: torch.Tensor,
    pool: KvPool,
    layer: int,
    batch: RaggedBatch,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    soft_cap: float = math.inf,
    window_tokens: int = WINDOW_TOKENS_MAX,
) -> torch.Tensor:
    """See the module. Raises ``ValueError`` on a wrong shape, cap or window, ``IndexError`` for
    a row whose page table is too short or names a page outside of the pool."""
    if out is None:
        out = torch.empty(q.shape, dtype=torch.float32)
    check_shapes(q, pool, batch, out)
    check_limits(soft_cap, window_tokens)
    if not is_native():
        mixed = reference.paged_attention(
            q, pool, layer, batch, scale, soft_cap=soft_cap, window_tokens=window_tokens
        )
        return out.copy_(mixed)
    bad = native().pm_paged_attention(
        pool.structs[layer], q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0),
        q.shape[0], q.shape[1], batch.tables.data_ptr(), batch.table_indptr.data_ptr(),
        batch.sequences, batch.row_sequence.data_ptr(), batch.row_position.data_ptr(), scale,
        soft_cap, window_tokens, threads(),
    )  # fmt: skip
    if bad:
        raise IndexError(
            f"row {bad - 1} at position {int(batch.row_position[bad - 1])} of sequence "
            f"{int(batch.row_sequence[bad - 1])} has no page in the pool for all that it sees"
        )
    return out


def check_shapes(q: torch.Tensor, pool: KvPool, batch: RaggedBatch, out: torch.Tensor) -> None:
    """Raises ``ValueError`` that says what was expected and what was got."""
    for name, rows in (("q", q), ("out", out)):
        check_heads(name, rows, rows_count=batch.rows, head_dim=pool.layout.head_dim)
    check_sharing(q.shape[1], pool)
    if q.shape[1] != out.shape[1]:
        raise ValueError(f"out: expected {q.shape[1]} heads, got {out.shape[1]}")


def check_sharing(head_count: int, pool: KvPool) -> None:
    """Raises ``ValueError`` when that many query heads cannot share the KV heads of ``pool``."""
    kv_heads = pool.layout.kv_heads
    if head_count < 1 or head_count % kv_heads:
        raise ValueError(f"{head_count} query heads do not share {kv_heads} KV heads")


def check_limits(soft_cap: float, window_tokens: int) -> None:
    """Raises ``ValueError`` for a cap or a window that is not allowed."""
    if not soft_cap > 0 or window_tokens < 1:
        raise ValueError(f"expected a cap above 0 and a window, got {soft_cap}, {window_tokens}")
