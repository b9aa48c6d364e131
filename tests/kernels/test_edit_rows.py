"""Masks, biases and penalties of rows: what numpy makes of them, to the last bit, and back."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagemesh.kernels.edit_rows import ColumnCounts, RowEdits, edit_rows, reference, restore_rows

WIDTH = 5003


def some_edits(seed: int, width: int = WIDTH, tokens: int = 900) -> RowEdits:
    """Masks, biases and penalties that touch the same columns, and some that no row has."""
    rng = np.random.default_rng(seed)
    biased = (0, 3, *rng.integers(width + 50, size=40).tolist())
    edits = RowEdits(
        masked=[*rng.integers(width + 50, size=5).tolist(), 3, 3],
        bias={column: float(rng.normal()) for column in biased},
        repetition=float(rng.choice([0.7, 1.0, 1.3])),
        frequency=float(rng.choice([-0.7, 0.0, 0.3])),
        presence=float(rng.choice([-1.1, 0.0, 0.9])),
    )  # fmt: skip
    text = (rng.integers(width, size=tokens) ** 2 // width).astype(np.uint32)
    edits.repeated.count_anew(text)
    edits.counted.count_anew(text[tokens // 3 :])
    edits.masks = bool(seed % 2)
    return edits


@pytest.mark.parametrize("threads", [1, 2])
def test_edits_are_those_of_numpy_and_what_was_there_comes_back(
    with_threads: Callable[[int], None], threads: int
) -> None:
    with_threads(threads)
    x = torch.randn(40, WIDTH) * 3
    x[:, ::7] = -math.inf
    x[1, 5], x[2, 6], x[3, ::2] = math.nan, math.inf, -0.0
    before = x.clone()
    rows = torch.randperm(40)[:33]
    edits = [some_edits(seed) for seed in range(33)]
    expected = x.clone()
    saved = edit_rows(x, rows, edits)
    reference.edit_rows(expected, rows, edits)
    assert torch.equal(x.view(torch.int32), expected.view(torch.int32))
    assert not torch.equal(x.view(torch.int32), before.view(torch.int32))
    restore_rows(x, saved)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


def test_edits_that_say_nothing_change_no_bit() -> None:
    x = torch.randn(1, 50)
    x[0, :3] = torch.tensor([-0.0, math.nan, -math.inf])
    before = x.clone()
    saved = edit_rows(x, torch.zeros(1, dtype=torch.int64), [RowEdits()])
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))
    restore_rows(x, saved)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


def test_rows_may_lie_apart() -> None:
    wide, rows = torch.randn(5, 90), torch.tensor([4, 0])
    edits = [some_edits(1, 60, 30), some_edits(2, 60, 30)]
    near, before = wide[:, 10:70].contiguous(), wide.clone()
    edit_rows(near, rows, edits)
    saved = edit_rows(wide[:, 10:70], rows, edits)
    assert torch.equal(wide[:, 10:70], near)
    assert torch.equal(wide[:, 70:], before[:, 70:])
    restore_rows(wide[:, 10:70], saved)
    assert torch.equal(wide, before)


def test_columns_that_are_counted_one_by_one_are_those_counted_at_once() -> None:
    text = (np.arange(3000) ** 2 % 701).astype(np.uint32)
    slow, fast = ColumnCounts(), ColumnCounts()
    slow.count_anew(text[:10])
    for token in text[10:].tolist():
        slow.add(token)
    fast.count_anew(text)
    order = np.argsort(slow.columns)
    assert np.array_equal(slow.columns[order], fast.columns)
    assert np.array_equal(slow.counts[order], fast.counts)
    assert slow.size == fast.size == len(set(text.tolist()))
    assert slow.end == fast.end == int(text.max()) + 1
    fast.count_anew(text[:0])
    assert (fast.size, fast.end) == (0, 0)


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_is_not_there_is_refused_and_nothing_changed(row: int) -> None:
    x = torch.randn(2, 50)
    before = x.clone()
    with pytest.raises(IndexError, match=f"row {row} is not one of the 2"):
        edit_rows(x, torch.tensor([0, row]), [some_edits(1, 50, 9), some_edits(3, 50, 9)])
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", ["repeated", "counted"])
def test_a_column_that_is_not_there_is_refused_and_nothing_changed(kind: str) -> None:
    x, edits = torch.randn(2, 50), [some_edits(1, 50, 9), some_edits(2, 50, 9)]
    before = x.clone()
    getattr(edits[1], kind).add(50)
    with pytest.raises(IndexError, match="column 50 is not one of the 50 there are"):
        edit_rows(x, torch.arange(2), edits)
    assert torch.equal(x, before)


def test_wrong_shapes_and_rows_that_come_twice_are_refused() -> None:
    x, rows, edits = torch.randn(2, 8), torch.arange(2), [RowEdits(), RowEdits()]
    with pytest.raises(ValueError, match=r"x: expected float32 \[rows, 8\]"):
        edit_rows(x.double(), rows, edits)
    with pytest.raises(ValueError, match=r"rows: expected contiguous torch.int64 \[2\]"):
        edit_rows(x, rows.int(), edits)
    with pytest.raises(ValueError, match=r"rows: .* got torch.int64 \[1\]"):
        edit_rows(x, rows[:1], edits)
    with pytest.raises(ValueError, match=r"rows: expected none twice, got \[1, 1\]"):
        edit_rows(x, torch.tensor([1, 1]), edits)
