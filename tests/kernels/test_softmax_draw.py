"""Drawing by the softmax of a row: what the definition says, and the same anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.softmax_draw import SUM_BLOCK, reference, softmax_draw

WIDTHS = (1, 15, 16, 17, 100, 1023, 1024, 1025, 5003)
WEIGHT_ERROR = 87 * 3 * 2**-24
"""An exponent of at most 87 that was rounded twice, where the reference rounds it once."""
HIGHEST_UNIFORM = math.nextafter(1.0, 0.0)


def temperatures_of(count: int) -> torch.Tensor:
    return torch.tensor([1.0, 0.1, 0.7, 2.5, 100.0]).repeat(count // 5 + 1)[:count].clone()


def uniforms_of(count: int) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64)


def one(row: torch.Tensor, uniform: float, temperature: float = 1.0) -> int:
    given = (torch.tensor([temperature]), torch.tensor([uniform], dtype=torch.float64))
    return int(softmax_draw(row[None], torch.zeros(1, dtype=torch.int64), *given)[0])


@pytest.mark.parametrize("count", [0, 1, 7, 40])
@pytest.mark.parametrize("width", WIDTHS)
def test_weights_sums_and_columns_are_those_of_the_definition(
    level: CpuLevel, count: int, width: int
) -> None:
    x, rows = torch.randn(9, width) * 5, torch.randint(9, (count,))
    heat, uniforms = temperatures_of(count), uniforms_of(count)
    weights, expected = torch.empty(count, width), torch.empty(count, width)
    columns, sums = softmax_draw(x, rows, heat, uniforms, weights=weights)
    _, expected_sums = reference.softmax_draw(x, rows, heat, uniforms, weights=expected)
    torch.testing.assert_close(weights, expected, rtol=WEIGHT_ERROR, atol=1e-30)
    torch.testing.assert_close(sums, expected_sums, rtol=WEIGHT_ERROR, atol=1e-30)
    edges = torch.nn.functional.pad(weights.double().cumsum(1), (1, 0))
    edges = edges / edges[:, -1:]
    below, above = (edges.gather(1, columns[:, None] + end)[:, 0] for end in (0, 1))
    assert bool((above > below).all())
    assert bool(((below - 1e-12 <= uniforms) & (uniforms <= above + 1e-12)).all())


def test_what_blocks_weigh_is_the_exact_sum_rounded_as_a_double(level: CpuLevel) -> None:
    x, rows = torch.randn(3, 4000), torch.arange(3)
    weights = torch.empty(3, 4000)
    _, sums = softmax_draw(x, rows, torch.ones(3), uniforms_of(3), weights=weights)
    for row, own in zip(weights, sums.tolist(), strict=True):
        exact = [math.fsum(block.tolist()) for block in row.split(SUM_BLOCK)]
        assert own == pytest.approx(exact, rel=1e-15)


def test_a_row_has_the_same_bits_in_any_company(
    level: CpuLevel, with_threads: Callable[[int], None]
) -> None:
    x = torch.randn(199, 3001) * 4  # enough work for more than one thread
    heat, uniforms = temperatures_of(199), uniforms_of(199)
    weights = torch.empty_like(x)
    with_threads(1)
    columns, sums = softmax_draw(x, torch.arange(199), heat, uniforms, weights=weights)
    for threads in (1, 2, 3):
        with_threads(threads)
        for rows in (torch.arange(199), torch.arange(198, 90, -1), torch.tensor([7])):
            own = torch.empty(len(rows), 3001)
            found = softmax_draw(x, rows, heat[rows], uniforms[rows], weights=own)
            assert torch.equal(found[0], columns[rows])
            assert torch.equal(found[1], sums[rows])
            assert torch.equal(own, weights[rows])
            bare = softmax_draw(x, rows, heat[rows], uniforms[rows])
            assert torch.equal(bare[0], columns[rows])


@pytest.mark.parametrize("width", [3, 100, 5003])
def test_what_is_forbidden_is_never_drawn(level: CpuLevel, width: int) -> None:
    row = torch.randn(width)
    row[: width // 3] = row[-(width // 3) :] = -math.inf
    allowed = range(width // 3, width - width // 3)
    assert one(row, 0.0) == allowed[0]
    assert one(row, HIGHEST_UNIFORM) == allowed[-1]
    assert one(row, 0.5, temperature=100.0) in allowed


def test_equal_logits_are_drawn_equally_often(level: CpuLevel) -> None:
    row = torch.full((3000,), -7.0)
    for uniform in (0.0, 0.1, 0.341, 0.5, 0.9, HIGHEST_UNIFORM):
        assert one(row, uniform) == int(uniform * 3000)


@pytest.mark.parametrize("temperature", [1e-30, torch.finfo(torch.float32).tiny])
def test_next_to_no_temperature_leaves_only_the_highest(
    level: CpuLevel, temperature: float
) -> None:
    row = torch.randn(2000)
    row[::7], row[5] = -3e38, 3e38
    for uniform in (0.0, 0.5, HIGHEST_UNIFORM):
        assert one(row, uniform, temperature) == 5


@pytest.mark.parametrize("width", [1, 17, 3000])
@pytest.mark.parametrize("place", [0, 0.5, 1])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_row_without_a_highest_number_says_so_and_changes_no_other(
    level: CpuLevel, width: int, place: float, broken: float
) -> None:
    x, uniforms = torch.randn(3, width), uniforms_of(3)
    expected = softmax_draw(x, torch.arange(3), torch.ones(3), uniforms)
    x[1, int(place * (width - 1))] = broken
    columns, sums = softmax_draw(x, torch.arange(3), torch.ones(3), uniforms)
    assert sums.sum(1).isfinite().tolist() == [True, False, True]
    assert columns[1] == 0
    assert torch.equal(columns[::2], expected[0][::2])
    assert torch.equal(sums[::2], expected[1][::2])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_row_of_no_numbers_at_all_says_so(level: CpuLevel, broken: float) -> None:
    given = (torch.zeros(1, dtype=torch.int64), torch.ones(1), uniforms_of(1))
    columns, sums = softmax_draw(torch.full((1, 1500), broken), *given)
    assert not sums.sum().isfinite()
    assert columns.tolist() == [0]


def test_rows_may_lie_apart(level: CpuLevel) -> None:
    wide, rows = torch.randn(5, 64), torch.tensor([4, 0, 4])
    given = (rows, torch.ones(3), uniforms_of(3))
    columns, sums = softmax_draw(wide[:, 10:60], *given)
    expected = softmax_draw(wide[:, 10:60].contiguous(), *given)
    assert torch.equal(columns, expected[0])
    assert torch.equal(sums, expected[1])


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_is_not_there_is_refused(level: CpuLevel, row: int) -> None:
    rows = torch.tensor([0, row])
    for draw in (softmax_draw, reference.softmax_draw):
        with pytest.raises(IndexError, match=f"row {row} is not one of the 2"):
            draw(torch.randn(2, 8), rows, torch.ones(2), uniforms_of(2))


def test_wrong_shapes_are_refused() -> None:
    x, rows, heat, uniforms = torch.randn(2, 8), torch.arange(2), torch.ones(2), uniforms_of(2)
    with pytest.raises(ValueError, match=r"x: expected float32 \[rows, 8\]"):
        softmax_draw(x.double(), rows, heat, uniforms)
    with pytest.raises(ValueError, match="at least one column"):
        softmax_draw(x[:, :0], rows, heat, uniforms)
    with pytest.raises(ValueError, match=r"rows: expected contiguous torch.int64 \[2\]"):
        softmax_draw(x, rows.int(), heat, uniforms)
    with pytest.raises(ValueError, match=r"temperatures: .* got torch.float32 \[1\]"):
        softmax_draw(x, rows, heat[:1], uniforms)
    with pytest.raises(ValueError, match=r"uniforms: expected contiguous torch\.float64"):
        softmax_draw(x, rows, heat, uniforms.float())
    with pytest.raises(ValueError, match="weights: expected 2 rows"):
        softmax_draw(x, rows, heat, uniforms, weights=torch.empty(3, 8))
