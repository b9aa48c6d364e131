"""Triton kernels over rows, in the interpreter: what their references compute.

float32 only: the interpreter's bfloat16 is wrong, and down-casts are the hardware's own.
"""

from __future__ import annotations

import pytest
import torch

from pagemesh.kernels.add_rms_norm import reference as add_rms_norm_reference
from pagemesh.kernels.add_rms_norm import triton as add_rms_norm_triton
from pagemesh.kernels.kv_codes import CODE_DTYPES, decode, encode
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.merge_states import reference as merge_states_reference
from pagemesh.kernels.merge_states import triton as merge_states_triton
from pagemesh.kernels.quantise import triton as quantise_triton
from pagemesh.kernels.rms_norm import reference as rms_norm_reference
from pagemesh.kernels.rms_norm import triton as rms_norm_triton
from pagemesh.kernels.rope import reference as rope_reference
from pagemesh.kernels.rope import triton as rope_triton
from pagemesh.kernels.silu_mul import reference as silu_mul_reference
from pagemesh.kernels.silu_mul import triton as silu_mul_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
WIDTHS = (1, 16, 17, 100, 576)
MINUS_INFINITY = float("-inf")
QUANTISED = pytest.mark.parametrize("dtype", ["int8", "e4m3"])


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_its_reference(rows: int, width: int) -> None:
    x, weight = torch.randn(rows, 2 * width)[:, :width] * 3, torch.randn(width)
    expected = rms_norm_reference.rms_norm(x, weight, 1e-6)
    got = rms_norm_triton.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_sum_and_its_norm_are_their_reference(rows: int, width: int) -> None:
    stream, addend, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    twin = stream.clone()
    expected = add_rms_norm_reference.add_rms_norm(twin, addend, weight, 1e-6)
    got = add_rms_norm_triton.add_rms_norm(stream, addend, weight, 1e-6)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(stream, twin)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("width", [*WIDTHS, 1500])
def test_silu_mul_is_its_reference(rows: int, width: int) -> None:
    x = torch.randn(rows, 2 * width) * 10
    expected = silu_mul_reference.silu_mul(x)
    torch.testing.assert_close(silu_mul_triton.silu_mul(x), expected, rtol=1e-5, atol=1e-6)


def test_silu_mul_takes_gates_of_any_size() -> None:
    x = torch.tensor([[-1e30, -1000.0, -90.0, -87.0, 0.0, 87.0, 1e30] + [1.0] * 7])
    expected = silu_mul_reference.silu_mul(x)
    torch.testing.assert_close(silu_mul_triton.silu_mul(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize(("head_dim", "rotary"), [(2, 2), (64, 64), (40, 40), (80, 32)])
def test_rope_is_its_reference_and_leaves_its_neighbours(
    rows: int, head_dim: int, rotary: int
) -> None:
    joined = torch.randn(rows, 5 * head_dim)
    x = joined[:, : 3 * head_dim].view(rows, 3, head_dim)
    rest = joined[:, 3 * head_dim :].clone()
    turns = torch.rand(rows, rotary // 2) * 100
    expected = rope_reference.rope(x, turns.cos(), turns.sin())
    got = rope_triton.rope(x, turns.cos(), turns.sin())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(joined[:, 3 * head_dim :], rest)


@pytest.mark.parametrize("parts", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("head_dim", [16, 40])
def test_merged_parts_are_their_reference(parts: int, head_dim: int) -> None:
    states, lse = torch.randn(3, 2, parts, head_dim), torch.randn(3, 2, parts) * 20
    expected = merge_states_reference.merge_states(states, lse)
    got = merge_states_triton.merge_states(states, lse)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_part_without_positions_is_not_read_and_without_any_the_result_is_zero() -> None:
    states, lse = torch.randn(3, 1, 20, 16), torch.randn(3, 1, 20)
    lse[0, 0, 3:], lse[1], lse[2, 0, :17] = MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY
    states[torch.isneginf(lse)] = float("nan")
    expected = merge_states_reference.merge_states(states, lse)
    got = merge_states_triton.merge_states(states, lse)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert not got[1].any()


def test_a_part_that_is_no_number_shows_in_the_result() -> None:
    states, lse = torch.randn(2, 1, 20, 16), torch.randn(2, 1, 20)
    lse[0, 0, 17] = float("nan")
    for merge in (merge_states_reference.merge_states, merge_states_triton.merge_states):
        assert merge(states, lse).isnan().all(-1).tolist() == [[True], [False]]


def test_merged_softmax_of_parts_is_the_softmax_of_the_whole() -> None:
    scores, values = torch.randn(1, 1, 96) * 5, torch.randn(96, 16)
    parts = scores.view(1, 1, 6, 16)
    states = torch.einsum("rhsp,spd->rhsd", parts.softmax(-1), values.view(6, 16, 16))
    whole = scores.softmax(-1)[0] @ values
    got = merge_states_triton.merge_states(states, parts.logsumexp(-1))
    torch.testing.assert_close(got[0], whole, rtol=1e-5, atol=1e-6)


@QUANTISED
@pytest.mark.parametrize("rows", [0, 1, 20])
@pytest.mark.parametrize("width", [1, 17, 128])
def test_codes_and_scales_are_those_of_a_page(dtype: KvDtype, rows: int, width: int) -> None:
    x = torch.randn(rows, width) * 10 ** torch.empty(rows, width).uniform_(-4, 3)
    x[:1] = 0.0
    codes, scales = quantise_triton.quantise(x, CODE_DTYPES[dtype])
    expected, expected_scales = encode(x, dtype)
    assert expected_scales is not None
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.int8), expected.view(torch.int8))
    assert torch.equal(quantise_triton.dequantise(codes, scales), decode(codes, scales))


def test_every_e4m3_byte_that_is_a_number_is_read_exactly() -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes[~codes.float().isnan()].view(1, -1)
    got = quantise_triton.dequantise(numbers, torch.ones(1))
    assert torch.equal(got, numbers.float())
    assert got.abs().max() == 448.0


def test_every_tie_between_two_e4m3_values_goes_to_the_even_one() -> None:
    codes = torch.arange(127, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[:-1] + codes[1:]) / 2
    x = torch.cat([ties, -ties, torch.tensor([448.0])]).view(1, -1)  # 448: the scale is 1
    values, scales = quantise_triton.quantise(x, torch.float8_e4m3fn)
    assert scales.item() == 1.0
    assert torch.equal(values.float(), x.to(torch.float8_e4m3fn).float())


def test_wrong_shapes_are_refused_with_what_was_expected_and_got() -> None:
    x = torch.randn(2, 6)
    with pytest.raises(ValueError, match=r"x: expected float \[rows, 5\].*got .*\[2, 6\]"):
        rms_norm_triton.rms_norm(x, torch.randn(5), 1e-6)
    with pytest.raises(ValueError, match="addend: expected 2 rows, got 3"):
        add_rms_norm_triton.add_rms_norm(x, torch.randn(3, 6), torch.randn(6), 1e-6)
    with pytest.raises(ValueError, match="at most 2 columns, got 3"):
        angles = torch.randn(2, 3)
        rope_triton.rope(torch.randn(2, 1, 4), angles, angles)
    with pytest.raises(ValueError, match=r"lse: expected contiguous float32 \[1, 2, 3\]"):
        merge_states_triton.merge_states(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 4))
    with pytest.raises(ValueError, match=r"x: expected a cpu tensor, got one on meta"):
        rms_norm_triton.rms_norm(x.to("meta"), torch.randn(6), 1e-6)
