"""``top_scores``: log-probabilities of given columns of a row, and of its highest ones.

    scores[i, j]      = s[i, columns[i, j]]
    top_columns[i, j] = the column of the j-th highest of x[rows[i]], j < top_counts[i]
    tops[i, j]        = s[i, top_columns[i, j]]

where s[i] is ``log_softmax`` of x[rows[i]], to the last bit: base e.

x            float32 [n, width], rows contiguous, not modified; minus infinity is a forbidden token
rows         int64 [count], contiguous; a row of x may be named several times
columns      int64 [count, m], contiguous; m may be 0
top_counts   int64 [count], contiguous, not below 0; numbers above width count as width
scores       float32 [count, m]; top_columns  int64 [count, most]; tops  float32 [count, most];
             returned; ``most`` is the highest of ``top_counts``, but at most width; 0 beyond the
             count of a row

Among equals the lowest columns come first: equals in x, not in s, where different values may be
rounded to the same. For a row with any NaN the first columns are returned in place of the highest,
and all scores are NaN. What is returned for a row depends only on the row, its columns and its
count.
"""

from __future__ import annotations

import ctypes

import torch

from pagemesh.kernels.dispatch import is_native, native, rows_float32, threads
from pagemesh.kernels.native.library import ScoredStruct
from pagemesh.kernels.top_scores import reference


def top_scores(
    x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, top_counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(scores, top_columns, tops)``; see the module. Raises ``ValueError`` on a wrong shape or
    dtype, ``IndexError`` for a row or column that ``x`` does not have."""
    width, count = x.shape[-1], len(rows)
    rows_float32(x, "x", width)
    _check("rows", rows, (count,))
    _check("columns", columns, (count, columns.shape[-1]))
    _check("top_counts", top_counts, (count,))
    counts = top_counts.tolist()
    if min(counts, default=0) < 0:
        raise ValueError(f"top_counts: expected none below 0, got {min(counts)}")
    most = min(max(counts, default=0), width)
    if not is_native():
        return reference.top_scores(x, rows, columns, top_counts, most)
    scores = torch.empty(columns.shape, dtype=torch.float32)
    top_columns = torch.zeros((count, most), dtype=torch.int64)
    tops = torch.zeros((count, most), dtype=torch.float32)
    asked = ScoredStruct(
        rows.data_ptr(), columns.data_ptr(), top_counts.data_ptr(), columns.shape[1], count
    )
    bad = native().pm_top_scores(
        x.data_ptr(), x.stride(0), len(x), width, ctypes.byref(asked), most,
        scores.data_ptr(), top_columns.data_ptr(), tops.data_ptr(), threads(),
    )  # fmt: skip
    if bad:
        raise IndexError(
            f"row {int(rows[bad - 1])} with columns {columns[bad - 1].tolist()} is not in "
            f"{list(x.shape)}"
        )
    return scores, top_columns, tops


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not torch.int64 or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous torch.int64 {list(shape)}, got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
