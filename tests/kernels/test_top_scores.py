"""Log-probabilities of asked and highest columns: the bits of the whole log-softmax, and the order
that sorting gives."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagemesh.kernels.log_softmax import log_softmax
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.top_scores import reference, top_scores

WIDTHS = (1, 15, 16, 17, 64, 97, 1025, 33_001)
COUNTS = (0, 1, 2, 5, 20, 50, 300, 40_000)


def expect_what_sorting_gives(x: torch.Tensor, counts: tuple[int, ...] = COUNTS) -> None:
    """Of every row of ``x``, so many of the highest and a few columns anywhere."""
    width = x.shape[1]
    rows = torch.arange(len(x)).repeat_interleave(len(counts))
    wanted = torch.tensor(counts).repeat(len(x))
    columns = torch.randint(width, (len(rows), 3))
    scores, best, tops = top_scores(x, rows, columns, wanted)
    whole = log_softmax(x)
    assert torch.equal(scores, whole[rows[:, None], columns])
    assert best.shape == tops.shape == (len(rows), min(max(counts), width))
    for index, (row, count) in enumerate(zip(rows.tolist(), wanted.tolist(), strict=True)):
        expected = np.argsort(-x[row].numpy(), kind="stable")[:count]
        assert best[index, :count].numpy().tolist() == expected.tolist()
        assert torch.equal(tops[index, :count], whole[row, torch.from_numpy(expected)])
        assert not best[index, count:].any() and not tops[index, count:].any()


@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_highest_and_their_scores_are_those_of_the_whole_row(
    level: CpuLevel, width: int, spread: float
) -> None:
    expect_what_sorting_gives(torch.randn(3, width) * spread)


@pytest.mark.parametrize("width", [17, 97, 1025, 5003])
def test_of_equals_the_lowest_columns_come_first(level: CpuLevel, width: int) -> None:
    few = torch.randint(-2, 3, (3, width)).float()
    expect_what_sorting_gives(few)
    expect_what_sorting_gives(few * 0.0)  # zeros of both signs
    expect_what_sorting_gives(torch.full((1, width), -7.5))


@pytest.mark.parametrize("width", [17, 1025])
def test_forbidden_columns_come_last_in_their_order(level: CpuLevel, width: int) -> None:
    x = torch.randn(4, width)
    x[0, ::2] = x[1, 1:] = x[2, :-1] = -math.inf
    x[3, 5::3] = torch.finfo(torch.float32).min
    expect_what_sorting_gives(x)


def test_a_row_that_rises_or_falls_all_the_way_is_sorted_too(level: CpuLevel) -> None:
    rising = torch.arange(-2000, 2003).float()
    expect_what_sorting_gives(torch.stack((rising, rising.flip(0), rising.abs() * 1e-40)))


def test_a_row_has_the_same_bits_in_any_company(
    level: CpuLevel, with_threads: Callable[[int], None]
) -> None:
    x, columns = torch.randn(99, 3001), torch.randint(3001, (99, 1))  # enough for two threads
    counts = torch.randint(0, 25, (99,))
    alone = [
        top_scores(x[i : i + 1], torch.zeros(1).long(), columns[i : i + 1], counts[i : i + 1])
        for i in range(99)
    ]
    for threads in (1, 2, 3):
        with_threads(threads)
        for rows in (torch.arange(99), torch.arange(98, 40, -1)):
            found = top_scores(x, rows, columns[rows], counts[rows])
            for place, row in enumerate(rows.tolist()):
                for own, expected in zip(found, alone[row], strict=True):
                    assert torch.equal(own[place, : expected.shape[1]], expected[0])


def test_rows_may_lie_apart(level: CpuLevel) -> None:
    wide, rows = torch.randn(5, 64), torch.tensor([4, 0, 4])
    given = (rows, torch.tensor([[3], [49], [0]]), torch.tensor([4, 0, 9]))
    own = zip(
        top_scores(wide[:, 10:60], *given),
        top_scores(wide[:, 10:60].contiguous(), *given),
        strict=True,
    )
    assert all(torch.equal(*pair) for pair in own)


@pytest.mark.parametrize("width", [17, 1500])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_a_row_with_what_is_no_number_has_no_scores_and_changes_no_other(
    level: CpuLevel, width: int, place: float
) -> None:
    given = (torch.arange(3), torch.zeros((3, 1), dtype=torch.int64), torch.tensor([5, 5, 5]))
    x = torch.randn(3, width)
    expected = top_scores(x, *given)
    x[1, int(place * (width - 1))] = math.nan
    for found, before in zip(top_scores(x, *given), expected, strict=True):
        assert torch.equal(found[::2], before[::2])
    scores, best, tops = top_scores(x, *given)
    assert scores[1].isnan().all() and tops[1].isnan().all()
    assert best[1].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_without_a_finite_highest_the_order_stands_and_no_score_is_a_number(
    level: CpuLevel, value: float
) -> None:
    x = torch.full((1, 50), -math.inf)
    x[0, 20:30] = value
    scores, best, tops = top_scores(
        x, torch.zeros(1).long(), torch.tensor([[25, 0]]), torch.tensor([12])
    )
    assert scores.isnan().all() and tops.isnan().all()
    assert best[0].tolist() == np.argsort(-x[0].numpy(), kind="stable")[:12].tolist()


@pytest.mark.parametrize(("row", "column"), [(2, 0), (-1, 0), (0, 8), (0, -1)])
def test_a_row_or_column_that_is_not_there_is_refused(
    level: CpuLevel, row: int, column: int
) -> None:
    x, none = torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)
    given = (torch.tensor([0, row]), torch.tensor([[1], [column]]), none)
    with pytest.raises(
        IndexError, match=rf"row {row} with columns \[{column}\] is not in \[2, 8\]"
    ):
        top_scores(x, *given)
    with pytest.raises(
        IndexError, match=rf"row {row} with columns \[{column}\] is not in \[2, 8\]"
    ):
        reference.top_scores(x, *given, 0)


def test_the_reference_says_the_same() -> None:
    x, rows, columns = torch.randn(3, 40), torch.tensor([2, 0]), torch.tensor([[1, 39], [0, 5]])
    counts = torch.tensor([3, 7])
    found = top_scores(x, rows, columns, counts)
    expected = reference.top_scores(x, rows, columns, counts, 7)
    assert torch.equal(found[1], expected[1])
    for own, slow in ((found[0], expected[0]), (found[2], expected[2])):
        torch.testing.assert_close(own, slow, rtol=2e-6, atol=2e-6)


def test_wrong_shapes_are_refused() -> None:
    x, rows, columns = torch.randn(2, 8), torch.arange(2), torch.zeros((2, 1), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"x: expected float32 \[rows, 8\]"):
        top_scores(x.double(), rows, columns, rows)
    with pytest.raises(ValueError, match=r"rows: expected contiguous torch.int64 \[2\]"):
        top_scores(x, rows.int(), columns, rows)
    with pytest.raises(ValueError, match=r"columns: expected contiguous torch.int64 \[2, 1\]"):
        top_scores(x, rows, columns[:1], rows)
    with pytest.raises(ValueError, match=r"top_counts: .* got torch.int64 \[1\]"):
        top_scores(x, rows, columns, rows[:1])
    with pytest.raises(ValueError, match="top_counts: expected none below 0, got -3"):
        top_scores(x, rows, columns, rows - 3)
