"""``rope`` on a GPU: one program per row and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemesh.kernels.triton_support import expect_heads, expect_rows


@triton.jit
def turned(low, high, cosine, sine):
    """The two halves of a head, rotated."""
    return low * cosine - high * sine, high * cosine + low * sine


@triton.jit
def _rotate(x, cosine, sine, row_stride, head_dim, half, block: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, block)
    kept = at < half
    own = x + row * row_stride + head * head_dim + at
    low = tl.load(own, mask=kept, other=0.0).to(tl.float32)
    high = tl.load(own + half, mask=kept, other=0.0).to(tl.float32)
    c = tl.load(cosine + row * half + at, mask=kept, other=0.0)
    s = tl.load(sine + row * half + at, mask=kept, other=0.0)
    low, high = turned(low, high, c, s)
    tl.store(own, low, mask=kept)
    tl.store(own + half, high, mask=kept)


def rope(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """See the package; x may be float32, float16 or bfloat16, the tables are float32. Raises
    ``ValueError``."""
    rows, heads, head_dim = x.shape
    half = cosine.shape[1]
    expect_heads("x", x, rows_count=rows, head_dim=head_dim)
    for name, table in (("cosine", cosine), ("sine", sine)):
        expect_rows(name, table, width=half)
        if table.shape[0] != rows or not table.is_contiguous():
            raise ValueError(f"{name}: expected contiguous [{rows}, {half}]")
    if 2 * half > head_dim:
        raise ValueError(f"cosine: expected at most {head_dim // 2} columns, got {half}")
    if x.numel() and half:
        _rotate[(rows, heads)](
            x, cosine, sine, x.stride(0), head_dim, half, triton.next_power_of_2(half), num_warps=1
        )
    return x
