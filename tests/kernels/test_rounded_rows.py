"""Products whose rows are rounded to bfloat16: the bits of rounded rows, however it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.kernels.test_linear import ROWS

from pagemesh.kernels.linear import reference
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import linear, pack_linear
from pagemesh.kernels.weight_types import WeightType

EITHER = pytest.mark.parametrize("weight_type", ["bfloat16", "int8"])


@EITHER
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 16), (47, 3), (95, 257), (333, 1301), (600, 64)])
def test_a_product_has_the_bits_of_the_one_with_rounded_rows(
    level: CpuLevel,
    weight_type: WeightType,
    n: int,
    k: int,
    with_threads: Callable[[int], None],
) -> None:
    plain = pack_linear(torch.randn(n, k), torch.randn(n), weight_type=weight_type)
    rounding = replace(plain, rounds_rows=True)
    x = torch.randn(300, k) * 10.0 ** torch.linspace(-8, 8, 300)[:, None]
    x[7, k // 2] = torch.nan
    x[8, :2] = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8])[:k]  # ties: to 1 and to 1 + 2**-6
    for threads in (1, 2):
        with_threads(threads)
        for rows in (*ROWS, 253, 300):
            for row_invariant in (False, True):
                found = linear(x[:rows], rounding, row_invariant=row_invariant)
                given = x[:rows].bfloat16().float()
                expected = linear(given, plain, row_invariant=row_invariant)
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
                assert torch.equal(found[7:8].isnan(), torch.ones(len(found[7:8]), n) > 0)


@EITHER
def test_a_row_has_the_same_bits_in_any_company(level: CpuLevel, weight_type: WeightType) -> None:
    packed = pack_linear(torch.randn(1333, 901), weight_type=weight_type, rounds_rows=True)
    x = torch.randn(300, 901)
    alone = torch.cat([linear(row[None], packed, row_invariant=True) for row in x])
    for rows in (*ROWS, 300):
        assert torch.equal(linear(x[:rows], packed, row_invariant=True), alone[:rows]), rows
        if level < CpuLevel.AMX:  # few and many are done alike there in any case
            assert torch.equal(linear(x[:rows], packed), alone[:rows]), rows


@EITHER
def test_the_result_is_that_of_torch_and_not_that_of_rows_as_they_are(
    level: CpuLevel, weight_type: WeightType
) -> None:
    plain = pack_linear(torch.randn(70, 500), weight_type=weight_type)
    rounding = replace(plain, rounds_rows=True)
    for rows in (3, 40):
        x = torch.randn(rows, 500)
        by_torch = torch.empty(rows, 70)
        reference.linear(x, rounding, by_torch)
        torch.testing.assert_close(linear(x, rounding), by_torch, rtol=1e-5, atol=1e-4)
        gap = (linear(x, plain) - by_torch).abs().max() / by_torch.abs().max()
        assert 1e-5 < gap < 1e-2


def test_rows_are_given_in_strides_and_left_as_they_are(level: CpuLevel) -> None:
    packed = pack_linear(torch.randn(40, 25), weight_type="bfloat16", rounds_rows=True)
    wide = torch.randn(30, 33)
    before = wide.clone()
    found = linear(wide[:, 5:30], packed)
    assert torch.equal(found, linear(wide[:, 5:30].contiguous(), packed))
    assert torch.equal(wide, before)


@pytest.mark.parametrize("weight_type", ["float32", "float16"])
def test_weights_with_more_bits_than_a_bfloat16_are_refused(weight_type: WeightType) -> None:
    with pytest.raises(ValueError, match=f"int8, slim_bfloat16 panels, got {weight_type}"):
        pack_linear(torch.randn(8, 4), weight_type=weight_type, rounds_rows=True)
