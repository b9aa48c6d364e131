"""``silu_mul`` on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemesh.kernels.triton_support import expect_rows

_BLOCK = 1024


@triton.jit
def _gate_rows(x, out, x_stride, out_stride, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    gate = tl.load(x + row * x_stride + at, mask=at < width, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + at, mask=at < width, other=0.0).to(tl.float32)
    # exp(-gate) may overflow to infinity, and gate / infinity is the right zero.
    tl.store(out + row * out_stride + at, gate / (1.0 + tl.exp(-gate)) * up, mask=at < width)


def silu_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See the package; float32, float16 or bfloat16, arithmetic is float32. Raises
    ``ValueError``."""
    rows, width = x.shape[0], x.shape[1] // 2
    expect_rows("x", x, width=2 * width)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device) if out is None else out
    expect_rows("out", out, width=width)
    if out.numel():
        _gate_rows[(rows, triton.cdiv(width, _BLOCK))](
            x, out, x.stride(0), out.stride(0), width, _BLOCK, num_warps=4
        )
    return out
