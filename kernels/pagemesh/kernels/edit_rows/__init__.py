"""``edit_rows`` applies masks, biases and penalties to rows, in place; ``restore_rows`` undoes it.

    x[j] = minus infinity                                          j in masked
    x[j] = x[j] + bias[j]                                          j in bias
    x[j] = x[j] / repetition if x[j] > 0 else x[j] * repetition    j in repeated
    x[j] = (x[j] - frequency * counts[j]) - presence               j in counted

in this order, each result rounded to float32. Above, x is one row; edits[i] apply to row rows[i].

x      float32 [n, width], rows contiguous; MUTATED where edits say
rows   int64 [count], contiguous, distinct

Masked and biased columns beyond the width are ignored. The cost of an edit depends on the number of
its columns, not on the width; those of ``ColumnCounts`` are kept from one step to the next.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pagemesh.kernels.dispatch import is_native, native, rows_float32, threads
from pagemesh.kernels.edit_rows import reference
from pagemesh.kernels.edit_rows.column_counts import F32, I64, ColumnCounts
from pagemesh.kernels.native.library import EditsStruct

__all__ = ["ColumnCounts", "RowEdits", "Saved", "edit_rows", "restore_rows"]


class RowEdits:
    """The edits of one row; not to be changed between ``edit_rows`` and ``restore_rows``."""

    __slots__ = (
        "_struct", "address", "biased", "biases", "counted", "frequency", "masked", "masks",
        "presence", "repeated", "repetition",
    )  # fmt: skip

    def __init__(
        self,
        *,
        masked: Iterable[int] = (),
        bias: Mapping[int, float] | None = None,
        repetition: float = 1.0,
        frequency: float = 0.0,
        presence: float = 0.0,
    ) -> None:
        self.masked: I64 = np.fromiter(masked, np.int64)
        """Contiguous; may be another array in the next step."""
        self.masks = True
        """Whether columns ``masked`` are masked; may change from one step to the next."""
        self.biased: I64 = np.fromiter(bias or (), np.int64)
        self.biases: F32 = np.fromiter((bias or {}).values(), np.float32)
        self.repetition, self.frequency, self.presence = repetition, frequency, presence
        self.repeated = ColumnCounts()
        """Only which columns it has matters, not how often each occurs."""
        self.counted = ColumnCounts()
        self._struct = EditsStruct(
            biased=self.biased.ctypes.data,
            biases=self.biases.ctypes.data,
            biased_count=len(self.biased),
            repetition=repetition,
            frequency=frequency,
            presence=presence,
        )
        self.address = ctypes.addressof(self._struct)

    def prepare(self) -> int:
        """Update the struct that the native library reads; returns how many columns are edited."""
        own, repeated, counted = self._struct, self.repeated, self.counted
        own.masked = self.masked.ctypes.data
        own.masked_count = masks = len(self.masked) if self.masks else 0
        own.repeated, own.repeated_count = repeated.columns_at, repeated.size
        own.counted, own.counted_count = counted.columns_at, counted.size
        own.counts = counted.counts_at
        return masks + len(self.biased) + repeated.size + counted.size


class Saved(NamedTuple):
    """What ``edit_rows`` did, and what was there before."""

    rows: torch.Tensor
    edits: Sequence[RowEdits]
    table: I64
    """The address of each row's edits, [count], then where its values start, [count + 1]."""
    values: torch.Tensor


def edit_rows(x: torch.Tensor, rows: torch.Tensor, edits: Sequence[RowEdits]) -> Saved:
    """See the module. Raises ``ValueError`` on a wrong shape or dtype or when a row comes twice,
    ``IndexError`` for a row, or a repeated or counted column, that ``x`` does not have; nothing is
    changed then."""
    width, count = x.shape[-1], len(edits)
    rows_float32(x, "x", width)
    if rows.dtype is not torch.int64 or rows.shape != (count,) or not rows.is_contiguous():
        raise ValueError(
            f"rows: expected contiguous torch.int64 [{count}], got {rows.dtype} {list(rows.shape)}"
        )
    if len(set(rows.tolist())) != count:
        raise ValueError(f"rows: expected none twice, got {rows.tolist()}")
    for one in edits:
        end = max(one.repeated.end, one.counted.end)
        if end > width:
            raise IndexError(f"column {end - 1} is not one of the {width} there are")
    starts = [0, *itertools.accumulate(one.prepare() for one in edits)]
    table = np.array([*(one.address for one in edits), *starts], np.int64)
    if not is_native():
        return Saved(rows, edits, table, reference.edit_rows(x, rows, edits))
    saved, at = torch.empty(starts[-1], dtype=torch.float32), table.ctypes.data
    bad = native().pm_edit_rows(
        x.data_ptr(), x.stride(0), len(x), width, rows.data_ptr(), at,
        at + count * table.itemsize, count, saved.data_ptr(), threads(),
    )  # fmt: skip
    if bad:
        raise IndexError(f"row {int(rows[bad - 1])} is not one of the {len(x)} there are")
    return Saved(rows, edits, table, saved)


def restore_rows(x: torch.Tensor, saved: Saved) -> None:
    """Restore ``x`` to what it was before ``edit_rows``, to the last bit."""
    if not is_native():
        x[saved.rows] = saved.values
        return
    count, at = len(saved.edits), saved.table.ctypes.data
    native().pm_restore_rows(
        x.data_ptr(), x.stride(0), x.shape[1], saved.rows.data_ptr(), at,
        at + count * saved.table.itemsize, count, saved.values.data_ptr(), threads(),
    )  # fmt: skip
