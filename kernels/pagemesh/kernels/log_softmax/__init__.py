"""``log_softmax``: logits to log-probabilities, base e.

    out[r, i] = x[r, i] - max(x[r]) - log(sum over j of exp(x[r, j] - max(x[r])))

x    float32 [rows, width], rows contiguous; minus infinity is a forbidden token
out  float32 [rows, width]; written, returned; may be ``x`` itself; allocated when not given

A row's result depends only on the row.
"""

from __future__ import annotations

import torch

from pagemesh.kernels.dispatch import is_native, native, rows_float32, rows_out, threads
from pagemesh.kernels.log_softmax import reference


def log_softmax(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See the module. Raises ``ValueError`` on a wrong shape."""
    width = x.shape[-1]
    rows_float32(x, "x", width)
    out = rows_out(out, x.shape[0], width, like=x)
    if not is_native():
        return out.copy_(reference.log_softmax(x))
    native().pm_log_softmax(
        x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), x.shape[0], width, threads()
    )
    return out
