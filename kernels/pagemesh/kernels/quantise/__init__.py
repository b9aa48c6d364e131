"""``quantise`` and ``dequantise``: a row of numbers as bytes and one scale.

    scale[r] = max |x[r]| / top            top = 127 (int8) or 448 (e4m3)
    values[r, i] = x[r, i] / scale[r]      rounded to the nearest, ties to even
    dequantise: values[r, i] * scale[r]

x       float [rows, width], contiguous rows, finite
values  int8 [rows, width], or ``torch.float8_e4m3fn`` (OCP e4m3: largest finite 448, no infinity)
scales  float32 [rows]; a row of zeros has scale 0 and bytes 0

Symmetric: zero is a byte of its own and there is no offset.
"""

from __future__ import annotations

import torch

from pagemesh.kernels.quantise import reference

TOP = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest magnitude of each type of bytes."""


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``values`` and ``scales``; see the module. Raises ``ValueError`` for another ``dtype`` or
    shape."""
    _expect(x, dtype)
    if x.is_cuda:
        from pagemesh.kernels.quantise import triton

        return triton.quantise(x, dtype)
    return reference.quantise(x, dtype)


def dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [rows, width]; see the module. Raises ``ValueError`` on a wrong type or shape."""
    _expect(values, values.dtype)
    if scales.shape != values.shape[:1] or scales.dtype is not torch.float32:
        raise ValueError(
            f"scales: expected float32 [{values.shape[0]}], got {scales.dtype} {list(scales.shape)}"
        )
    if values.is_cuda:
        from pagemesh.kernels.quantise import triton

        return triton.dequantise(values, scales)
    return reference.dequantise(values, scales)


def _expect(rows: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype not in TOP:
        raise ValueError(f"values are int8 or float8_e4m3fn, not {dtype}")
    if rows.dim() != 2 or not rows.is_contiguous():
        raise ValueError(f"expected contiguous [rows, width], got {list(rows.shape)}")
