"""``rms_norm`` on a GPU: one program per row, one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemesh.kernels.triton_support import expect_rows, warps_of


@triton.jit
def normed(x, weight, width, epsilon):
    """float32 ``x / rms(x) * weight`` of one row; elements from ``width`` on are 0."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / width + epsilon) * weight


@triton.jit
def _norm_rows(x, weight, out, x_stride, out_stride, width, epsilon, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    own = tl.load(x + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
    factor = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + at, normed(own, factor, width, epsilon), mask=at < width)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See the package; x, weight and out may be float32, float16 or bfloat16, arithmetic is
    float32. Raises ``ValueError``."""
    rows, width = x.shape
    expect_rows("x", x, width=weight.shape[0])
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    expect_rows("out", out, width=width)
    if rows:
        block = triton.next_power_of_2(width)
        _norm_rows[(rows,)](
            x, weight, out, x.stride(0), out.stride(0), width, epsilon, block,
            num_warps=warps_of(block),
        )  # fmt: skip
    return out
