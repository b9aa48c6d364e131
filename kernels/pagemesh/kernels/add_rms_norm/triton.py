"""``add_rms_norm`` on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemesh.kernels.rms_norm.triton import normed
from pagemesh.kernels.triton_support import expect_rows, warps_of


@triton.jit
def _add_norm_rows(
    stream, addend, weight, out, stream_stride, addend_stride, width, epsilon, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    kept = at < width
    own = tl.load(stream + row * stream_stride + at, mask=kept, other=0.0).to(tl.float32)
    own += tl.load(addend + row * addend_stride + at, mask=kept, other=0.0).to(tl.float32)
    factor = tl.load(weight + at, mask=kept, other=0.0).to(tl.float32)
    tl.store(stream + row * stream_stride + at, own, mask=kept)
    tl.store(out + row * width + at, normed(own, factor, width, epsilon), mask=kept)


def add_rms_norm(
    stream: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """See the package. Raises ``ValueError`` on a wrong shape."""
    rows, width = stream.shape
    expect_rows("stream", stream, width=weight.shape[0])
    expect_rows("addend", addend, width=width)
    if addend.shape[0] != rows:
        raise ValueError(f"addend: expected {rows} rows, got {addend.shape[0]}")
    out = torch.empty((rows, width), dtype=stream.dtype, device=stream.device)
    if rows:
        block = triton.next_power_of_2(width)
        _add_norm_rows[(rows,)](
            stream, addend, weight, out, stream.stride(0), addend.stride(0), width, epsilon,
            block, num_warps=warps_of(block),
        )  # fmt: skip
    return out
