"""int8 weights: what quantising may change, and the product against torch over what codes mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagemesh.kernels.linear import reference
from pagemesh.kernels.linear.packed import PackedLinear, quantised, unpack_linear
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import linear, pack_linear, packed_shape

ROWS = (1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 64)


def pack_int8(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    return pack_linear(weight, bias, weight_type="int8")


@pytest.mark.parametrize("rows", [0, *ROWS])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 16), (47, 3), (48, 130), (95, 257), (200, 64)])
def test_the_product_is_that_of_torch_over_what_the_codes_mean(
    level: CpuLevel, rows: int, n: int, k: int
) -> None:
    packed, x = pack_int8(torch.randn(n, k), torch.randn(n)), torch.randn(rows, k)
    expected = torch.empty(rows, n)
    reference.linear(x, packed, expected)
    torch.testing.assert_close(linear(x, packed), expected, rtol=1e-5, atol=2e-5)


def test_the_product_is_close_to_exact_over_a_long_sum(level: CpuLevel) -> None:
    packed, x = pack_int8(torch.randn(64, 8192)), torch.randn(4, 8192)
    exact = x.double() @ unpack_linear(packed).double().T
    error = (linear(x, packed) - exact).abs().max() / exact.abs().max()
    assert error < 2e-6


def test_a_row_has_the_same_bits_in_any_company(
    level: CpuLevel, with_threads: Callable[[int], None]
) -> None:
    # Enough work for more than one thread even with one row; a last panel that is not whole.
    packed = pack_int8(torch.randn(1333, 902), torch.randn(1333))
    x = torch.randn(max(ROWS), 902)
    alone = torch.cat([linear(x[i : i + 1], packed) for i in range(len(x))])
    for threads in (1, 2, 3):
        with_threads(threads)
        for rows in ROWS:
            assert torch.equal(linear(x[:rows], packed), alone[:rows]), (threads, rows)
            shifted = linear(x[-rows:], packed)
            assert torch.equal(shifted, alone[-rows:]), (threads, rows)


def test_a_long_chunk_has_the_bits_of_its_rows_alone(
    level: CpuLevel, with_threads: Callable[[int], None]
) -> None:
    # More rows, panels and values of K than a unit of work has, and none of them a multiple.
    packed = pack_int8(torch.randn(331, 301), torch.randn(331))
    x = torch.randn(611, 301)
    alone = torch.cat([linear(row[None], packed) for row in x])
    for threads in (1, 2, 5):
        with_threads(threads)
        for rows in (257, 611):
            assert torch.equal(linear(x[:rows], packed), alone[:rows]), (threads, rows)


def test_a_column_has_the_same_bits_in_any_panel(level: CpuLevel) -> None:
    weight, x = torch.randn(100, 70), torch.randn(20, 70)
    whole = linear(x, pack_int8(weight))
    for first in (0, 1, 13, 16, 50):
        part = linear(x, pack_int8(weight[first : first + 49]))
        assert torch.equal(part, whole[:, first : first + 49])


@pytest.mark.parametrize("rows", [1, 40])
def test_a_weight_that_is_no_number_shows_in_its_column_alone(level: CpuLevel, rows: int) -> None:
    weight = torch.randn(40, 30)
    weight[3, 7], weight[20, 1] = float("nan"), float("inf")
    found = linear(torch.randn(rows, 30), pack_int8(weight))
    broken = ~found.isfinite()
    assert broken[:, [3, 20]].all()
    assert broken.sum() == 2 * rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_off_by_half_a_code_at_most_and_the_largest_of_a_row_by_none(
    dtype: torch.dtype,
) -> None:
    # More rows than are quantised at once, of very different magnitudes.
    weight = (torch.randn(4_200, 17) * torch.logspace(-12, 12, 4_200)[:, None]).to(dtype)
    largest = weight.float().abs().amax(1)
    error = (unpack_linear(pack_int8(weight)) - weight.float()).abs()
    assert (error <= largest[:, None] / 254 * (1 + 1e-5)).all()
    at = weight.float().abs().argmax(1)
    assert (error[torch.arange(len(at)), at] <= 1e-6 * largest).all()


def test_codes_are_symmetric_whole_numbers_and_a_row_of_zeros_stays_one() -> None:
    weight = torch.tensor([[-2.54, 1.0, 0.03], [0.0, 0.0, 0.0], [3e-45, -1e-45, 0.0]])
    codes, scales = quantised(weight)
    assert codes[0].tolist() == [-127, 50, 2], "1.5 codes go to the even one"
    assert scales[0] == pytest.approx(0.02)
    assert not codes[1].any() and scales[1] == 0
    assert codes[2].abs().max() <= 127, "even where the scale is no normal number"


def test_packing_pads_with_zeros_and_can_use_memory_of_others() -> None:
    weight = torch.randn(37, 29)
    memory = torch.full(packed_shape(37, 29, "int8"), 7, dtype=torch.int8)
    packed = pack_linear(weight, out=memory, weight_type="int8")
    assert packed.panels.data_ptr() == memory.data_ptr()
    assert packed.weight_type == "int8"
    assert not packed.panels[2, :29, 5:].any(), "columns beyond the weight are zero"
    codes, scales = quantised(weight)
    assert torch.equal(unpack_linear(packed), codes * scales[:, None])
    transposed = pack_int8(weight.T.contiguous().T)
    assert torch.equal(transposed.panels, packed.panels)


def test_panels_of_another_shape_or_type_are_refused() -> None:
    empty = torch.empty(0)
    with pytest.raises(ValueError, match=r"expected \(1, 8, 16\), got \(1, 4, 16\)"):
        PackedLinear(8, 4, torch.zeros(1, 4, 16, dtype=torch.int8), empty)
    with pytest.raises(ValueError, match="float32 or int8"):
        PackedLinear(8, 4, torch.zeros(1, 4, 16, dtype=torch.float16), empty)
    with pytest.raises(ValueError, match=r"expected \(1, 4, 16\), got \(1, 8, 16\)"):
        pack_linear(torch.randn(8, 4), out=torch.zeros(packed_shape(8, 4, "int8")))
