"""Normalisation, rotation, gate and log-softmax: right, and the same bits for a row anywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagemesh.kernels.log_softmax import log_softmax
from pagemesh.kernels.log_softmax import reference as log_softmax_reference
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.rms_norm import reference as rms_norm_reference
from pagemesh.kernels.rms_norm import rms_norm
from pagemesh.kernels.rope import reference as rope_reference
from pagemesh.kernels.rope import rope
from pagemesh.kernels.silu_mul import reference as silu_mul_reference
from pagemesh.kernels.silu_mul import silu_mul

WIDTHS = (1, 15, 16, 17, 64, 100, 576)
Operation = Callable[[torch.Tensor], torch.Tensor]


def angles(rows: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.rand(rows, half) * 100
    return turns.cos(), turns.sin()


@pytest.mark.parametrize("rows", [0, 1, 7, 130])
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_that_of_torch(level: CpuLevel, rows: int, width: int) -> None:
    x, weight = torch.randn(rows, width) * 3, torch.randn(width)
    expected = rms_norm_reference.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 7, 130])
@pytest.mark.parametrize(("head_dim", "rotary"), [(2, 2), (64, 64), (40, 40), (80, 32), (6, 4)])
def test_rope_is_that_of_torch(level: CpuLevel, rows: int, head_dim: int, rotary: int) -> None:
    joined = torch.randn(rows, 5 * head_dim)
    x = joined[:, : 3 * head_dim].view(rows, 3, head_dim)
    rest = joined[:, 3 * head_dim :].clone()
    cosine, sine = angles(rows, rotary // 2)
    expected = rope_reference.rope(x, cosine, sine)
    torch.testing.assert_close(rope(x, cosine, sine), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(joined[:, 3 * head_dim :], rest), "what lies beside stays as it was"


@pytest.mark.parametrize("rows", [0, 1, 7, 130])
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul_is_that_of_torch(level: CpuLevel, rows: int, width: int) -> None:
    x = torch.randn(rows, 2 * width) * 10
    expected = silu_mul_reference.silu_mul(x)
    torch.testing.assert_close(silu_mul(x), expected, rtol=1e-5, atol=1e-6)


def test_silu_mul_takes_gates_of_any_size(level: CpuLevel) -> None:
    x = torch.tensor([[-1e30, -1000.0, -90.0, -87.0, 0.0, 87.0, 1e30] + [1.0] * 7])
    expected = silu_mul_reference.silu_mul(x)
    torch.testing.assert_close(silu_mul(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 7, 40])
@pytest.mark.parametrize("width", [*WIDTHS, 5003])
def test_log_softmax_is_that_of_torch(level: CpuLevel, rows: int, width: int) -> None:
    x = torch.randn(rows, width) * 8
    expected = log_softmax_reference.log_softmax(x)
    torch.testing.assert_close(log_softmax(x), expected, rtol=2e-6, atol=2e-6)


def test_log_softmax_is_as_exact_however_high_all_of_a_row_is(level: CpuLevel) -> None:
    x = torch.randint(-20, 20, (5, 100)).float()
    torch.testing.assert_close(log_softmax(x + 40_000.0), log_softmax(x), rtol=0.0, atol=0.0)


def test_log_softmax_keeps_forbidden_tokens_forbidden(level: CpuLevel) -> None:
    x = torch.randn(3, 50)
    x[:, ::3] = float("-inf")
    torch.testing.assert_close(
        log_softmax(x), log_softmax_reference.log_softmax(x), rtol=2e-6, atol=2e-6
    )


def rotated(x: torch.Tensor) -> torch.Tensor:
    heads = x.clone().view(len(x), 3, -1)
    half = heads.shape[2] // 2
    turns = x[:, :half].contiguous()  # angles that belong to the row
    return rope(heads, turns.cos(), turns.sin()).flatten(1)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: rms_norm(x, torch.linspace(-1, 1, x.shape[1]), 1e-5),
        rotated,
        silu_mul,
        log_softmax,
    ],
    ids=["rms_norm", "rope", "silu_mul", "log_softmax"],
)
def test_a_row_has_the_same_bits_in_any_company(
    level: CpuLevel, with_threads: Callable[[int], None], operation: Operation
) -> None:
    x = torch.randn(999, 306)  # enough work for more than one thread
    alone = torch.cat([operation(x[i : i + 1]) for i in range(len(x))])
    for threads in (1, 2, 3):
        with_threads(threads)
        assert torch.equal(operation(x), alone), threads
        assert torch.equal(operation(x[100:117]), alone[100:117]), threads


def test_results_may_go_where_the_input_was(level: CpuLevel) -> None:
    x, weight = torch.randn(5, 33), torch.randn(33)
    expected = rms_norm(x, weight, 1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-5, x), expected)
    expected = log_softmax(x)
    assert torch.equal(log_softmax(x, x), expected)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[rows, 8\]"):
        rms_norm(torch.randn(2, 9), torch.randn(8), 1e-5)
    with pytest.raises(ValueError, match="at most 4 columns, got 5"):
        rope(torch.randn(2, 1, 8), torch.randn(2, 5), torch.randn(2, 5))
    with pytest.raises(ValueError, match=r"contiguous \[2, 4\]"):
        rope(torch.randn(2, 1, 8), torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(ValueError, match=r"\[rows, 8\]"):
        silu_mul(torch.randn(2, 9))
