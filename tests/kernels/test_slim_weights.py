"""bfloat16 weights in twelve bits: the same values, and the same products to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagemesh.kernels.linear import reference, slim
from pagemesh.kernels.linear.packed import PackedLinear, unpack_linear
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import linear, pack_linear, packed_shape
from pagemesh.kernels.weight_types import WeightType

BLOCK_DEPTHS = (152, 176, 184, 456, 472)
"""Values of K in a block with AVX2: up to 64 rows of 304, 1,408 and 904 the first three, of more
rows of 904 and 1,408 the last two."""
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 64, 300)


def drawn(n: int, k: int) -> torch.Tensor:
    """Weights as they are, with what is rare in them: zeros, and numbers that have an exponent of
    their own, in the first and the last places that there are and twice in one group."""
    weight = (0.02 * torch.randn(n, k)).bfloat16()
    for row, column, value in (
        (0, 0, 1e30), (0, 1, -1e-30), (0, k - 1, 3.0), (n - 1, 0, 0.0), (n - 1, k - 1, -0.0),
        (n // 2, k // 2, -(2.0**-130)),
    ):  # fmt: skip
        weight[row, column] = value
    for depth in BLOCK_DEPTHS:
        weight[0, depth:k:depth] = 1e20
    return weight


def both(weight: torch.Tensor, rounds_rows: bool = False) -> tuple[PackedLinear, PackedLinear]:
    bias = torch.randn(len(weight))
    kinds: tuple[WeightType, WeightType] = ("slim_bfloat16", "bfloat16")
    kept, plain = (
        pack_linear(weight, bias, weight_type=kind, rounds_rows=rounds_rows) for kind in kinds
    )
    return kept, plain


@pytest.mark.parametrize(("n", "k"), [(1, 64), (16, 256), (37, 304), (107, 1408)])
def test_every_value_comes_back(n: int, k: int) -> None:
    weight = drawn(n, k)
    weight[n // 2, 3] = torch.inf
    kept, plain = both(weight)
    assert slim.fits(weight)
    assert kept.panels.nbytes < (0.78 if k > 300 else 0.9) * plain.panels.nbytes
    found = unpack_linear(kept)
    assert torch.equal(found.view(torch.int32), unpack_linear(plain).view(torch.int32))
    assert torch.equal(found.bfloat16(), weight)


@pytest.mark.parametrize("rounds_rows", [False, True])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (107, 1408), (1333, 304)])
def test_products_have_the_bits_of_bfloat16(
    level: CpuLevel, n: int, k: int, rounds_rows: bool, with_threads: Callable[[int], None]
) -> None:
    kept, plain = both(drawn(n, k), rounds_rows)
    x = torch.randn(max(ROWS), k)
    # On matrix tiles, which have other bits, slim weights are not multiplied, and others are.
    rows_here = ROWS if level < CpuLevel.AMX else ROWS[:4]
    for threads in (1, 2, 3):
        with_threads(threads)
        for rows in rows_here:
            assert torch.equal(linear(x[:rows], kept), linear(x[:rows], plain)), (threads, rows)


def test_a_row_has_the_same_bits_in_any_company(
    level: CpuLevel, with_threads: Callable[[int], None]
) -> None:
    kept, _ = both(drawn(1333, 904))
    x = torch.randn(max(ROWS), 904)
    alone = torch.cat([linear(row[None], kept, row_invariant=True) for row in x])
    by_torch = torch.empty_like(alone)
    reference.linear(x, kept, by_torch)
    bound = 1e-6 * by_torch.abs().amax(1, keepdim=True)
    assert ((alone - by_torch).abs() <= bound).all()
    for threads in (1, 2):
        with_threads(threads)
        for rows in ROWS:
            assert torch.equal(linear(x[-rows:], kept, row_invariant=True), alone[-rows:])


def test_no_number_stays_none(level: CpuLevel) -> None:
    weight = drawn(48, 64)
    weight[17, 5] = torch.nan
    kept, _ = both(weight)
    for rows in (1, 3, 7, 40):
        found = linear(torch.randn(rows, 64), kept).isnan()
        assert found[:, 17].all()
        assert found.sum() == rows


def test_what_does_not_fit_is_refused_by_name() -> None:
    wide = (torch.randn(32, 256) * 10.0 ** torch.linspace(-30, 30, 256)).bfloat16()
    for weight in (wide, drawn(16, 60), drawn(16, 16)):
        assert not slim.fits(weight)
    for weight, said in ((wide, "got too many for slim_bfloat16"), (drawn(16, 60), "of 8, got 60")):
        with pytest.raises(ValueError, match=said):
            pack_linear(weight, weight_type="slim_bfloat16")


def test_a_panel_holds_as_many_strays_as_it_has_room_for() -> None:
    weight = torch.full((16, 256), 0.01).bfloat16()
    sizes = 2.0 ** torch.arange(0, 100, 10)
    weight[0, :50:5], weight[15, 200:210] = sizes.bfloat16(), sizes.bfloat16()
    # Eight pairs of exponents have codes, one of them that of 0.01: three sizes have none.
    for strays in (6, 7, 8):
        assert slim.fits(weight)
        kept, _ = both(weight)
        assert kept.panels[0, 16].item() == strays
        assert torch.equal(unpack_linear(kept).bfloat16(), weight)
        weight[strays, 7] = 2.0 ** (100 + 10 * (strays - 6))  # one of a kind
    assert not slim.fits(weight)


def test_it_can_use_memory_of_others_and_takes_weights_of_any_stride() -> None:
    weight = drawn(37, 64)
    memory = torch.full(packed_shape(37, 64, "slim_bfloat16"), 7, dtype=torch.uint8)
    kept = pack_linear(weight, out=memory, weight_type="slim_bfloat16")
    assert kept.panels.data_ptr() == memory.data_ptr()
    assert torch.equal(unpack_linear(kept).bfloat16(), weight)
    apart = pack_linear(weight.T.contiguous().T, weight_type="slim_bfloat16")
    assert torch.equal(apart.panels, kept.panels)


def test_threads_share_the_panels(with_threads: Callable[[int], None]) -> None:
    fits, wide = drawn(533, 512), drawn(533, 512)
    wide[500] = (10.0 ** torch.linspace(-30, 30, 512)).bfloat16()
    alone = both(fits)[0].panels
    for threads in (1, 2, 3):
        with_threads(threads)
        assert torch.equal(both(fits)[0].panels, alone)
        assert slim.fits(fits) and not slim.fits(wide)


def test_it_pays_with_vectors_and_without_tiles(level: CpuLevel) -> None:
    vectors = {CpuLevel.AVX2, CpuLevel.AVX512, CpuLevel.AVX512_BF16}
    assert slim.pays() == (level in vectors)
