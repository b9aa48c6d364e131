"""``softmax_draw``: a column of each row, drawn by the row's softmax.

    w[i, j]  = exp((x[rows[i], j] - max(x[rows[i]])) / temperatures[i])
    sums[i, b] = sum of w[i, j] over the columns j of block b, SUM_BLOCK columns each
    columns[i] = first j with w[i, 0] + ... + w[i, j] > uniforms[i] * (sum of sums[i])

x             float32 [n, width], rows contiguous; minus infinity is never drawn
rows          int64 [count], contiguous; a row of x may be named several times
temperatures  float32 [count], contiguous, at least 2^-126, so that each has a reciprocal
uniforms      float64 [count], contiguous, in [0, 1)
weights       float32 [count, width], contiguous; w is written to it; not kept when not given
columns       int64 [count]; sums  float64 [count, blocks]; returned

Sums are float64. Where the highest of a row is no finite number, which includes a row with any
NaN, the sum of its ``sums`` is none either, and its column is 0. What is returned for a row
depends on nothing but the row, its temperature and its uniform.
"""

from __future__ import annotations

import torch

from pagemesh.kernels.dispatch import is_native, native, rows_float32, threads
from pagemesh.kernels.softmax_draw import reference

SUM_BLOCK = reference.SUM_BLOCK


def softmax_draw(
    x: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(columns, sums)``; see the module. Raises ``ValueError`` on a wrong shape or dtype,
    ``IndexError`` for a row that ``x`` has not."""
    width, count = x.shape[-1], len(rows)
    rows_float32(x, "x", width)
    _check("rows", rows, count, torch.int64)
    _check("temperatures", temperatures, count, torch.float32)
    _check("uniforms", uniforms, count, torch.float64)
    if width < 1:
        raise ValueError("x: expected at least one column to draw from")
    if weights is not None:
        rows_float32(weights, "weights", width)
        if len(weights) != count or not weights.is_contiguous():
            raise ValueError(f"weights: expected {count} rows, contiguous, got {len(weights)}")
    if not is_native():
        return reference.softmax_draw(x, rows, temperatures, uniforms, weights)
    columns = torch.empty(count, dtype=torch.int64)
    sums = torch.empty((count, -(-width // SUM_BLOCK)), dtype=torch.float64)
    bad = native().pm_softmax_draw(
        x.data_ptr(), x.stride(0), len(x), rows.data_ptr(), temperatures.data_ptr(),
        uniforms.data_ptr(), count, width, None if weights is None else weights.data_ptr(),
        sums.data_ptr(), columns.data_ptr(), threads(),
    )  # fmt: skip
    if bad:
        raise IndexError(f"row {int(rows[bad - 1])} is not one of the {len(x)} there are")
    return columns, sums


def _check(name: str, tensor: torch.Tensor, count: int, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype or tensor.shape != (count,) or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous {dtype} [{count}], got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
