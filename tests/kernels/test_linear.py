"""The matrix product against exact ones, and a row's bits against the company it keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagemesh.kernels.linear import reference
from pagemesh.kernels.linear.packed import exact_type, unpack_linear
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import linear, pack_linear, packed_shape
from pagemesh.kernels.weight_types import WEIGHT_TYPES, WeightType

ROWS = (*range(1, 18), 31, 33, 64)


# Slim weights take no K of any size: test_slim_weights.
EITHER = pytest.mark.parametrize(
    "weight_type", [name for name in WEIGHT_TYPES if name != "slim_bfloat16"]
)


@EITHER
@pytest.mark.parametrize("rows", [0, *ROWS])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 16), (47, 3), (48, 130), (95, 257), (200, 64)])
def test_the_product_is_exact_to_a_few_roundings_of_its_terms(
    level: CpuLevel, weight_type: WeightType, rows: int, n: int, k: int
) -> None:
    weight, bias, x = torch.randn(n, k), torch.randn(n), torch.randn(rows, k)
    packed = pack_linear(weight, bias, weight_type=weight_type)
    by_torch = torch.empty(rows, n)
    reference.linear(x, packed, by_torch)
    values = unpack_linear(packed).double()
    exact = x.double() @ values.T + bias.double()
    terms = x.double().abs() @ values.T.abs() + bias.double().abs()
    bound = (4e-7 if level < CpuLevel.AMX else 5e-7) * terms
    for result in (by_torch, linear(x, packed), linear(x, packed, row_invariant=True)):
        assert ((result - exact).abs() <= bound).all()


@EITHER
def test_the_product_is_close_to_exact_over_a_long_sum(
    level: CpuLevel, weight_type: WeightType
) -> None:
    packed = pack_linear(torch.randn(64, 8192), weight_type=weight_type)
    x = torch.randn(4, 8192)
    exact = x.double() @ unpack_linear(packed).double().T
    error = (linear(x, packed) - exact).abs().max() / exact.abs().max()
    assert error < 2e-6


@EITHER
@pytest.mark.parametrize("n", [1333, 1317])
def test_a_row_has_the_same_bits_in_any_company(
    level: CpuLevel, weight_type: WeightType, n: int, with_threads: Callable[[int], None]
) -> None:
    # Enough work for more than one thread even with one row, and enough panels to read them in
    # pairs, of which there is an odd one or not; a last panel that is not whole.
    packed = pack_linear(torch.randn(n, 902), torch.randn(n), weight_type=weight_type)
    x = torch.randn(max(ROWS), 902)
    alone = torch.cat([linear(x[i : i + 1], packed, row_invariant=True) for i in range(len(x))])
    for threads in (1, 2, 3):
        with_threads(threads)
        for rows in ROWS:
            assert torch.equal(linear(x[:rows], packed, row_invariant=True), alone[:rows]), (
                threads,
                rows,
            )
            shifted = linear(x[-rows:], packed, row_invariant=True)
            assert torch.equal(shifted, alone[-rows:]), (threads, rows)


@EITHER
def test_a_long_chunk_has_the_bits_of_its_rows_alone(
    level: CpuLevel, weight_type: WeightType, with_threads: Callable[[int], None]
) -> None:
    # More rows and panels than a unit of work has, and none of them a multiple.
    packed = pack_linear(torch.randn(331, 301), torch.randn(331), weight_type=weight_type)
    x = torch.randn(611, 301)
    alone = torch.cat([linear(row[None], packed, row_invariant=True) for row in x])
    for threads in (1, 2, 5):
        with_threads(threads)
        for rows in (257, 611):
            assert torch.equal(linear(x[:rows], packed, row_invariant=True), alone[:rows]), (
                threads,
                rows,
            )
    expected = torch.empty(611, 331)
    reference.linear(x, packed, expected)
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(linear(x, packed), expected, rtol=1e-5, atol=1e-4)


@EITHER
def test_units_of_as_many_rows_and_panels_as_there_are_keep_their_sums(
    level: CpuLevel, weight_type: WeightType, with_threads: Callable[[int], None]
) -> None:
    # Whole units whose rows are no whole tiles, over more than one block of K.
    packed = pack_linear(torch.randn(1536, 700), weight_type=weight_type)
    x = torch.randn(512, 700)
    alone = torch.cat([linear(row[None], packed, row_invariant=True) for row in x])
    for threads in (1, 2):
        with_threads(threads)
        for rows in (253, 256, 512):
            assert torch.equal(linear(x[:rows], packed, row_invariant=True), alone[:rows])


@EITHER
def test_rows_of_any_size_are_as_exact_and_no_number_stays_none(
    level: CpuLevel, weight_type: WeightType
) -> None:
    packed = pack_linear(torch.randn(33, 50), weight_type=weight_type)
    x = torch.randn(40, 50) * 10.0 ** torch.linspace(-30, 30, 40)[:, None]
    x[11, 7] = torch.nan
    exact = x.double() @ unpack_linear(packed).double().T
    largest = exact.abs().amax(dim=1, keepdim=True)
    for row_invariant in (False, True):
        error = (linear(x, packed, row_invariant=row_invariant) - exact).abs() / largest
        assert error[11].isnan().all()
        assert error.nan_to_num(0.0).max() < 1e-6


@EITHER
def test_a_column_has_the_same_bits_in_any_panel(level: CpuLevel, weight_type: WeightType) -> None:
    weight, x = torch.randn(100, 70), torch.randn(20, 70)
    whole = linear(x, pack_linear(weight, weight_type=weight_type), row_invariant=True)
    for first in (0, 1, 13, 16, 50):
        packed = pack_linear(weight[first : first + 49], weight_type=weight_type)
        assert torch.equal(linear(x, packed, row_invariant=True), whole[:, first : first + 49])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [3, 257, 1400])
def test_weights_in_half_precision_have_the_bits_of_the_same_values_in_float32(
    level: CpuLevel, half: torch.dtype, k: int, with_threads: Callable[[int], None]
) -> None:
    # Ordinary numbers, and the smallest and the largest that float16 has.
    weight = torch.randn(107, k)
    weight[::7] *= 1e-6
    weight[3, :2] = torch.tensor([65504.0, -5.960464477539063e-08])
    kept = pack_linear(weight.to(half), weight_type=exact_type(weight.to(half)))
    assert kept.panels.dtype is half
    wide = pack_linear(weight.to(half).float())
    assert torch.equal(unpack_linear(kept), unpack_linear(wide))
    x = torch.randn(300, k)
    for threads in (1, 2):
        with_threads(threads)
        for rows in (*ROWS, 300):
            for row_invariant in (False, True):
                found = linear(x[:rows], kept, row_invariant=row_invariant)
                expected = linear(x[:rows], wide, row_invariant=row_invariant)
                assert torch.equal(found, expected), (rows, row_invariant)


def test_the_exact_type_has_every_value_and_no_more_bytes_than_that_takes() -> None:
    values = torch.randn(700, 5)
    for half, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        kept = values.to(half)
        assert exact_type(kept) == exact_type(kept.float()) == exact_type(kept.double()) == name
    assert exact_type(values) == exact_type(values.double()) == "float32"
    assert exact_type(torch.tensor([[1.0, 2.0**100]])) == "bfloat16"
    assert exact_type(torch.tensor([[1.0, 1.0 + 2**-10]])) == "float16"
    assert exact_type(torch.tensor([[1.0 + 2**-10, 2.0**100]])) == "float32"
    assert exact_type(torch.tensor([[1.0, torch.nan]])) == "float32"
    assert exact_type(torch.zeros(4, 2), values.half().float()) == "float16", "of all of them"
    assert exact_type(values.half(), values.bfloat16()) == "float16"
    assert exact_type(values.half(), 2.0**100 * values.bfloat16()) == "float32"
    long = torch.ones(1, (1 << 20) + 1)
    long[0, -1] = 1.0 + 2**-20
    assert exact_type(long) == "float32", "the last one tells"


def test_strided_rows_are_read_and_written_in_place(level: CpuLevel) -> None:
    packed = pack_linear(torch.randn(40, 24))
    wide_x, wide_out = torch.randn(9, 30), torch.zeros(9, 64)
    result = linear(wide_x[:, 3:27], packed, wide_out[:, 8:48])
    assert torch.equal(result, linear(wide_x[:, 3:27].contiguous(), packed))
    assert not wide_out[:, :8].any()
    assert not wide_out[:, 48:].any()


def test_packing_keeps_every_weight_and_can_use_memory_of_others() -> None:
    weight = torch.randn(37, 29)
    memory = torch.full(packed_shape(37, 29), 7.0)
    packed = pack_linear(weight, out=memory)
    assert packed.panels.data_ptr() == memory.data_ptr()
    assert torch.equal(unpack_linear(packed), weight)
    assert not packed.panels[2, :, 5:].any(), "columns beyond the weight are zero"
    assert torch.equal(unpack_linear(pack_linear(weight.T.contiguous().T)), weight)
    half = pack_linear(weight.to(torch.bfloat16))
    assert torch.equal(unpack_linear(half), weight.to(torch.bfloat16).float())


def test_wrong_shapes_are_refused_with_what_was_expected_and_got() -> None:
    packed = pack_linear(torch.randn(8, 4))
    with pytest.raises(ValueError, match=r"\[rows, 4\].*got.*\[2, 5\]"):
        linear(torch.randn(2, 5), packed)
    with pytest.raises(ValueError, match="float64"):
        linear(torch.randn(2, 4, dtype=torch.float64), packed)
    with pytest.raises(ValueError, match="expected 2 rows, got 3"):
        linear(torch.randn(2, 4), packed, torch.empty(3, 8))
    with pytest.raises(ValueError, match="stride"):
        linear(torch.randn(4, 2).T, packed)
    with pytest.raises(ValueError, match="bias"):
        pack_linear(torch.randn(8, 4), torch.randn(7))
