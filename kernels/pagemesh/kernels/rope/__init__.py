"""``rope``: rotary position embedding (Su et al., 2021) in the half-split convention.

For i < rotary_dim / 2, with a = x[.., i] and b = x[.., i + rotary_dim / 2]:

    x[.., i]                  = a * cos[row, i] - b * sin[row, i]
    x[.., i + rotary_dim / 2] = b * cos[row, i] + a * sin[row, i]

x       float32 [rows, heads, head_dim]; a row's heads contiguous, any row stride, so a slice
        of a joined q, k, v product works; MUTATED in place
cosine  float32 [rows, rotary_dim / 2], contiguous, of each row's position (angles in radians)
sine    like ``cosine``

Dimensions from ``rotary_dim`` on are left alone. A row's result depends only on the row.
"""

from __future__ import annotations

import torch

from pagemesh.kernels.dispatch import check_heads, is_native, native, rows_float32, threads
from pagemesh.kernels.rope import reference


def rope(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotates ``x`` in place and returns it; see the module. Raises ``ValueError`` on a wrong
    shape."""
    rows, heads, head_dim = x.shape
    half = cosine.shape[1]
    check_heads("x", x, rows_count=rows, head_dim=head_dim)
    for name, table in (("cosine", cosine), ("sine", sine)):
        rows_float32(table, name, half)
        if table.shape[0] != rows or not table.is_contiguous():
            raise ValueError(f"{name}: expected contiguous [{rows}, {half}]")
    if 2 * half > head_dim:
        raise ValueError(f"cosine: expected at most {head_dim // 2} columns, got {half}")
    if is_native():
        native().pm_rope(
            x.data_ptr(), x.stride(0), cosine.data_ptr(), sine.data_ptr(), rows, heads,
            head_dim, 2 * half, threads(),
        )  # fmt: skip
        return x
    return x.copy_(reference.rope(x, cosine, sine))
