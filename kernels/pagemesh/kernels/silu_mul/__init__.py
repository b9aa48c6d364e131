"""``silu_mul``: the gate of a SwiGLU layer (Shazeer, 2020).

    out[r, i] = gate / (1 + exp(-gate)) * up    with gate = x[r, i], up = x[r, width + i]

x    float32 [rows, 2 * width]: gate and up side by side, rows contiguous
out  float32 [rows, width]; written, returned; allocated when not given

A row's result depends on nothing but the row.
"""

from __future__ import annotations

import torch

from pagemesh.kernels.dispatch import is_native, native, rows_float32, threads
from pagemesh.kernels.silu_mul import reference


def silu_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See the module. Raises ``ValueError`` on a wrong shape."""
    width = x.shape[-1] // 2
    rows_float32(x, "x", 2 * width)
    if out is None:
        out = torch.empty((x.shape[0], width), dtype=torch.float32)
    rows_float32(out, "out", width)
    if out.shape[0] != x.shape[0]:
        raise ValueError(f"out: expected {x.shape[0]} rows, got {out.shape[0]}")
    if not is_native():
        return out.copy_(reference.silu_mul(x))
    native().pm_silu_mul(
        x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), x.shape[0], width, threads()
    )
    return out
