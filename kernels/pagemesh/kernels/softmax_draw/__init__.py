"""``softmax_draw``: draws a column of each row by the row's softmax, within limits.

    w[i, j]  = exp((x[rows[i], j] - max(x[rows[i]])) / temperatures[i]), 0 where limits leave j out
    sums[i, b] = sum of w[i, j] over the columns j of block b, SUM_BLOCK columns each
    columns[i] = first j with w[i, 0] + ... + w[i, j] > uniforms[i] * (sum of sums[i])

x             float32 [n, width], rows contiguous; minus infinity is never drawn
rows          int64 [count], contiguous; a row of x may be named several times
temperatures  float32 [count], contiguous, at least 2^-126, so that each has a reciprocal
uniforms      float64 [count], contiguous, in [0, 1)
limits        what may be drawn, see ``Limits``; everything when not given
weights       float32 [count, width], contiguous; w is written to it; not kept when not given
columns       int64 [count]; sums  float64 [count, blocks]; returned

Sums are float64. If the highest value of a row is not finite, which includes a row with any NaN,
the sum of its ``sums`` is not finite either, its column is 0 and its w are meaningless. What is
returned for a row depends only on the row, its temperature, its uniform and its limits.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from pagemesh.kernels.dispatch import is_native, native, rows_float32, threads
from pagemesh.kernels.native.library import DrawsStruct
from pagemesh.kernels.softmax_draw import reference

SUM_BLOCK = reference.SUM_BLOCK


class Limits(NamedTuple):
    """What may be drawn from each row. Limits apply in this order; the highest w always stays.

    min_p  float32 [count], in [0, 1]; keeps w >= min_p (the highest is 1); 0 keeps all
    top_k  int64 [count]; keeps the top_k highest; 0, or at least width, keeps all
    top_p  float64 [count], in [0, 1]; of the w that the other limits keep, keeps, from the highest
           down, those before which there is less than top_p of their sum; 1 keeps all

    Among equals at an edge the lowest columns are kept. All are contiguous.
    """

    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


def softmax_draw(
    x: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    limits: Limits | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(columns, sums)``; see the module. Raises ``ValueError`` on a wrong shape or dtype,
    ``IndexError`` for a row that ``x`` does not have."""
    width, count = x.shape[-1], len(rows)
    rows_float32(x, "x", width)
    _check("rows", rows, count, torch.int64)
    _check("temperatures", temperatures, count, torch.float32)
    _check("uniforms", uniforms, count, torch.float64)
    if limits is not None:
        _check("min_p", limits.min_p, count, torch.float32)
        _check("top_k", limits.top_k, count, torch.int64)
        _check("top_p", limits.top_p, count, torch.float64)
    if width < 1:
        raise ValueError("x: expected at least one column to draw from")
    if weights is not None:
        rows_float32(weights, "weights", width)
        if len(weights) != count or not weights.is_contiguous():
            raise ValueError(f"weights: expected {count} rows, contiguous, got {len(weights)}")
    if not is_native():
        return reference.softmax_draw(x, rows, temperatures, uniforms, limits, weights)
    columns = torch.empty(count, dtype=torch.int64)
    sums = torch.empty((count, -(-width // SUM_BLOCK)), dtype=torch.float64)
    within = [None, None, None] if limits is None else [limit.data_ptr() for limit in limits]
    draws = DrawsStruct(
        rows.data_ptr(), temperatures.data_ptr(), uniforms.data_ptr(), *within, count
    )
    bad = native().pm_softmax_draw(
        x.data_ptr(), x.stride(0), len(x), ctypes.byref(draws), width,
        None if weights is None else weights.data_ptr(),
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
