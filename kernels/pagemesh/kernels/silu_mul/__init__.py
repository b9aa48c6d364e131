"""``silu_mul``: the gate of a SwiGLU layer (Shazeer, 2020).

    out[r, i] = gate / (1 + exp(-gate)) * up    with gate = x[r, i], up = x[r, width + i]

x    float32 [rows, 2 * width]: gate and up side by side, rows contiguous
out  float32 [rows, width]; written, returned; allocated when not given

A row's result depends only on the row.
"""

from __future__ import annotations

import torch

from pagemesh.kernels.dispatch import is_native, native, rows_float32, rows_out, threads
from pagemesh.kernels.silu_mul import reference


def silu_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See the module. Raises ``ValueError`` on a wrong shape."""
    width = x.shape[-1] // 2
    rows_float32(x, "x", 2 * width)
    out = rows_out(out, x.shape[0], width, like=x)
    if not is_native():
        return out.copy_(reference.silu_mul(x))
    native().pm_silu_mul(
        x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), x.shape[0], width, threads()
    )
    return out
