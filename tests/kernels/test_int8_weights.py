"""int8 weights: what quantising may change. Their product is tested beside float32's."""

from __future__ import annotations

import pytest
import torch

from pagemesh.kernels.linear.packed import PackedLinear, quantised, unpack_linear
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import linear, pack_linear, packed_shape


def pack_int8(weight: torch.Tensor) -> PackedLinear:
    return pack_linear(weight, weight_type="int8")


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
    with pytest.raises(ValueError, match="float32, int8, bfloat16, float16"):
        PackedLinear(8, 4, torch.zeros(1, 4, 16, dtype=torch.float64), empty)
    with pytest.raises(ValueError, match=r"expected \(1, 4, 16\), got \(1, 8, 16\)"):
        pack_linear(torch.randn(8, 4), out=torch.zeros(packed_shape(8, 4, "int8")))
