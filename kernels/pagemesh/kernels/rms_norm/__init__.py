"""``rms_norm``: root-mean-square normalisation (Zhang and Sennrich, 2019).

    out[r] = x[r] / sqrt(mean(x[r] ** 2) + epsilon) * weight

x       float32 [rows, width], rows contiguous; to normalise heads, pass a view
        ``[rows * heads, head_dim]``
weight  float32 [width]
out     float32 [rows, width]; written, returned; may be ``x`` itself; allocated when not given

A row's result depends only on the row.
"""

from __future__ import annotations

import torch

from pagemesh.kernels.dispatch import is_native, native, rows_float32, rows_out, threads
from pagemesh.kernels.rms_norm import reference


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See the module. Raises ``ValueError`` on a wrong shape."""
    width = weight.shape[0]
    rows_float32(x, "x", width)
    if weight.dtype is not torch.float32 or weight.dim() != 1 or not weight.is_contiguous():
        raise ValueError(f"weight: expected contiguous float32 [{width}], got {weight.dtype}")
    out = rows_out(out, x.shape[0], width, like=x)
    if not is_native():
        return out.copy_(reference.rms_norm(x, weight, epsilon))
    native().pm_rms_norm(
        x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), out.stride(0),
        x.shape[0], width, epsilon, threads(),
    )  # fmt: skip
    return out
