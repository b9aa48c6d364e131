"""What min_p, top_k and top_p leave of a row: exactly what sorting it would leave, and the same
anywhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.softmax_draw import SUM_BLOCK, Limits, reference, softmax_draw

WIDTHS = (1, 15, 17, 100, 256, 257, 1025, 5003)
LIMITS = [
    *itertools.product((0.0, 0.02, 1.0), (0, 1, 5, 300, 4000), (0.0, 0.05, 0.6, 0.95, 1.0)),
    (0.0, 2**62, 0.3), (1e-40, 0, 1.0), (0.0, -1, 1.0), (0.3, 10**6, 1e-12),
]  # fmt: skip


def limits_of(values: list[tuple[float, int, float]]) -> Limits:
    min_p, top_k, top_p = zip(*values, strict=True)
    return Limits(
        torch.tensor(min_p, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int64),
        torch.tensor(top_p, dtype=torch.float64),
    )


def expect_what_sorting_leaves(
    row: torch.Tensor, temperature: float = 1.0, limits: list[tuple[float, int, float]] = LIMITS
) -> None:
    """Draw from ``row`` within each of ``limits`` and compare with the reference, which gets the
    weights of this level, so that nothing but the limits could differ."""
    count, width = len(limits), len(row)
    rows, heat = torch.zeros(count, dtype=torch.int64), torch.full((count,), temperature)
    uniforms = torch.rand(count, dtype=torch.float64)
    everything, kept = torch.empty(count, width), torch.empty(count, width)
    softmax_draw(row[None], rows, heat, uniforms, weights=everything)
    columns, sums = softmax_draw(row[None], rows, heat, uniforms, limits_of(limits), kept)
    for index, (min_p, top_k, top_p) in enumerate(limits):
        expected = reference.limited(everything[index], min_p, top_k, top_p)
        assert torch.equal(kept[index], expected), (min_p, top_k, top_p)
        parts = (expected[at : at + SUM_BLOCK] for at in range(0, width, SUM_BLOCK))
        blocks = [math.fsum(part.tolist()) for part in parts]
        assert sums[index].tolist() == pytest.approx(blocks, rel=1e-15)
        edges = torch.nn.functional.pad(expected.double().cumsum(0), (1, 0))
        below, above = (edges[columns[index] : columns[index] + 2] / edges[-1]).tolist()
        assert below < above
        assert below - 1e-12 <= uniforms[index] <= above + 1e-12


@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_left_is_what_sorting_would_leave(
    level: CpuLevel, width: int, spread: float
) -> None:
    expect_what_sorting_leaves(torch.randn(width) * spread, 0.8)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kinds", [1, 2, 7])
def test_of_equals_at_an_edge_the_lowest_columns_are_left(
    level: CpuLevel, width: int, kinds: int
) -> None:
    expect_what_sorting_leaves(torch.randint(kinds, (width,)) * 0.7 - 3.0)
    every = [(0.0, top_k, 1.0) for top_k in range(1, min(width, 60))]
    expect_what_sorting_leaves(torch.full((width,), -3.0), limits=[*every, (1.0, 0, 1.0)])


@pytest.mark.parametrize("step", [2**-24, 2**-22, 2**-20])
def test_neighbours_whose_weights_rounding_may_swap_are_told_apart(
    level: CpuLevel, step: float
) -> None:
    row = (torch.randperm(5003) * step).float() - 5003 * step
    every = [(0.0, top_k, 1.0) for top_k in (3, 20, 100, 250, 1000)]
    expect_what_sorting_leaves(row, limits=[*every, (0.0, 0, 0.4), (0.9999, 0, 1.0)])
    expect_what_sorting_leaves(row - torch.arange(5003) // 17 * 0.01, limits=every)


@pytest.mark.parametrize("temperature", [2.0**-126, 1e-3, 0.05, 100.0])
def test_a_temperature_may_leave_next_to_nothing_or_everything(
    level: CpuLevel, temperature: float
) -> None:
    row = torch.randn(1500) * 3
    row[::3] = -3e38
    expect_what_sorting_leaves(row, temperature)


def test_what_is_forbidden_is_never_left(level: CpuLevel) -> None:
    row = torch.full((2100,), -math.inf)
    expect_what_sorting_leaves(row.index_fill(0, torch.tensor([1700]), -2.0))
    row[torch.arange(5, 2100, 40)] = torch.randn(53)
    expect_what_sorting_leaves(row)


def test_a_limit_that_leaves_one_leaves_the_first_of_the_highest(level: CpuLevel) -> None:
    row = torch.randn(3000).clamp(max=1.5)
    first = int(row.argmax())
    alone = [(0.0, 1, 1.0), (0.0, 0, 0.0), (1.0, 1, 1.0), (0.0, 0, 1e-300)]
    given = (torch.zeros(4, dtype=torch.int64), torch.ones(4), torch.full((4,), 0.999).double())
    columns, _ = softmax_draw(row[None], *given, limits_of(alone))
    assert columns.tolist() == [first] * 4


def test_a_row_has_the_same_bits_in_any_company(
    level: CpuLevel, with_threads: Callable[[int], None]
) -> None:
    x, heat = torch.randn(79, 5003) * 4, torch.rand(79) + 0.5
    own, uniforms = [*LIMITS, (0.0, 0, 1.0)] * 2, torch.rand(79, dtype=torch.float64)
    limits = Limits(*(limit[:79].clone() for limit in limits_of(own)))
    with_threads(1)
    columns, sums = softmax_draw(x, torch.arange(79), heat, uniforms, limits)
    for threads in (1, 2, 3):
        with_threads(threads)
        for rows in (torch.arange(79), torch.arange(78, 20, -1), torch.tensor([7])):
            some = Limits(*(limit[rows] for limit in limits))
            found = softmax_draw(x, rows, heat[rows], uniforms[rows], some)
            assert torch.equal(found[0], columns[rows])
            assert torch.equal(found[1], sums[rows])


def test_limits_that_limit_nothing_draw_as_none_do(level: CpuLevel) -> None:
    x, given = torch.randn(3, 5003), (torch.arange(3), torch.ones(3), torch.rand(3).double())
    limits = limits_of([(0.0, 0, 1.0), (0.0, 5003, 1.0), (0.0, -1, 1.0)])
    both = zip(softmax_draw(x, *given, limits), softmax_draw(x, *given), strict=True)
    for found, expected in both:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("limit", [(0.0, 5, 1.0), (0.0, 0, 0.9), (0.5, 0, 1.0), (0.1, 40, 0.5)])
@pytest.mark.parametrize("width", [1, 17, 3000])
@pytest.mark.parametrize("place", [0, 0.5, 1])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_row_without_a_highest_number_says_so_and_changes_no_other(
    level: CpuLevel, width: int, place: float, broken: float, limit: tuple[float, int, float]
) -> None:
    x, given = torch.randn(3, width), (torch.arange(3), torch.ones(3), torch.rand(3).double())
    x[:, ::5] = -math.inf
    x[:, -1] = 3e38
    expected = softmax_draw(x, *given, limits_of([limit] * 3))
    x[1, int(place * (width - 1))] = broken
    columns, sums = softmax_draw(x, *given, limits_of([limit] * 3))
    assert sums.sum(1).isfinite().tolist() == [True, False, True]
    assert columns[1] == 0
    assert torch.equal(columns[::2], expected[0][::2])
    assert torch.equal(sums[::2], expected[1][::2])


def test_a_row_in_which_everything_is_forbidden_says_so(level: CpuLevel) -> None:
    given = (torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.rand(1).double())
    row = torch.full((1, 1500), -math.inf)
    for draw in (softmax_draw, reference.softmax_draw):
        columns, sums = draw(row, *given, limits_of([(0.1, 3, 0.5)]))
        assert not sums.sum().isfinite()
        assert columns.tolist() == [0]


def test_wrong_shapes_are_refused() -> None:
    x, rows, uniforms = torch.randn(2, 8), torch.arange(2), torch.rand(2).double()
    good = limits_of([(0.1, 3, 0.5)] * 2)
    for wrong, named in (
        (
            good._replace(min_p=good.min_p.double()),
            r"min_p: expected contiguous torch.float32 \[2\]",
        ),
        (good._replace(top_k=good.top_k[:1]), r"top_k: .* got torch.int64 \[1\]"),
        (good._replace(top_p=good.top_p.float()), r"top_p: expected contiguous torch.float64"),
    ):
        with pytest.raises(ValueError, match=named):
            softmax_draw(x, rows, torch.ones(2), uniforms, wrong)
