"""Tiles of the attention kernels: every type, width and group has some that fit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch

from pagemesh.kernels.layout import KV_DTYPES, KvDtype, PageLayout
from pagemesh.kernels.paged_attention.tiles import (
    PAIRS,
    Tile,
    decode_tile,
    prefill_tile,
    product_of,
)

ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16)
SHARED_BYTES_MAX = 163 << 10
KINDS = pytest.mark.parametrize(
    "tile_of",
    [
        decode_tile,
        functools.partial(prefill_tile, has_wide_products=False),
        functools.partial(prefill_tile, has_wide_products=True),
    ],
    ids=["decode", "prefill", "prefill with wide products"],
)
HEADS = pytest.mark.parametrize("head_dim", [1, 18, 64, 80, 128, 192, 256, 512])


TileOf = Callable[..., Tile]


def tiles(tile_of: TileOf, head_dim: int, group: int) -> list[tuple[PageLayout, Tile]]:
    """Of all types."""
    layouts = [PageLayout(1, 1, head_dim, 16, dtype) for dtype in KV_DTYPES]
    return [
        (layout, tile_of(queries, layout, group, has_e4m3=has_e4m3))
        for queries, layout, has_e4m3 in itertools.product(ROW_TYPES, layouts, (False, True))
    ]


@pytest.mark.parametrize(
    ("queries", "pages", "product"),
    [
        (torch.float32, "float32", "tf32x3"),
        (torch.bfloat16, "float32", "tf32"),
        (torch.float16, "float32", "tf32"),
        (torch.float32, "int8", "tf32x2"),
        (torch.float32, "e4m3", "tf32x2"),
        (torch.float32, "bfloat16", "half"),
        (torch.float16, "float16", "half"),
        (torch.bfloat16, "e4m3", "half"),
    ],
)
def test_products_keep_what_the_types_are_worth(
    queries: torch.dtype, pages: KvDtype, product: str
) -> None:
    assert product_of(queries, pages) == product


@KINDS
@HEADS
@pytest.mark.parametrize("group", [1, 3, 8, 71, 129])
def test_a_tile_has_sides_that_instructions_take_and_room_for_a_group(
    tile_of: TileOf, head_dim: int, group: int
) -> None:
    for _, tile in tiles(tile_of, head_dim, group):
        assert tile.rows >= max(16, group)
        assert tile.block >= 16
        assert tile.chunk >= 64
        for side in (tile.rows, tile.block, tile.chunk, tile.warps):
            assert side & (side - 1) == 0


@KINDS
@HEADS
def test_blocks_on_their_way_fit_into_shared_memory(tile_of: TileOf, head_dim: int) -> None:
    """K and V of each stage but the one at hand, as they are in their pages."""
    width = 1 << (head_dim - 1).bit_length()
    for layout, tile in tiles(tile_of, head_dim, 4):
        block_bytes = 2 * tile.block * width * layout.item_bytes
        assert (tile.stages - 1) * block_bytes <= SHARED_BYTES_MAX


@HEADS
def test_decode_fits_into_the_shared_memory_of_smaller_cards(head_dim: int) -> None:
    """99 KiB, of which some is the kernel's own."""
    width = 1 << (head_dim - 1).bit_length()
    for layout, tile in tiles(decode_tile, head_dim, 4):
        block_bytes = 2 * tile.block * width * layout.item_bytes
        assert (tile.stages - 1) * block_bytes <= 64 << 10


@HEADS
def test_wider_heads_and_more_passes_take_no_larger_tiles(head_dim: int) -> None:
    """But those of 16 bits up to 64 wide, where smaller ones were faster on a GPU."""

    def area(queries: torch.dtype, pages: KvDtype, width: int) -> int:
        layout = PageLayout(1, 1, width, 16, pages)
        tile = prefill_tile(queries, layout, 1, has_e4m3=True, has_wide_products=False)
        assert tile.rows <= PAIRS
        return tile.rows * tile.block

    exact = area(torch.float32, "float32", head_dim)
    assert exact <= area(torch.bfloat16, "float32", head_dim)
    if head_dim > 64:
        own = area(torch.bfloat16, "bfloat16", head_dim)
        assert area(torch.bfloat16, "float32", head_dim) <= own
    assert area(torch.float32, "float32", min(2 * head_dim, 512)) <= exact


def upper_part(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & -8192).view(torch.float32)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_three_products_of_parts_are_off_by_three_times_what_float32_is(head_dim: int) -> None:
    """As the instructions take them, each part cut to 11 bits, but for the order of their sums."""
    a, b = torch.randn(64, head_dim), torch.randn(head_dim, 64)
    upper_a, upper_b = upper_part(a), upper_part(b)
    lower_a, lower_b = upper_part(a - upper_a), upper_part(b - upper_b)
    three = lower_a @ upper_b + upper_a @ lower_b + upper_a @ upper_b
    exact = a.double() @ b.double()

    def error(got: torch.Tensor) -> float:
        return float((got - exact).norm() / exact.norm())

    assert error(three) < 3 * error(a @ b)
    assert error(upper_a @ upper_b) > 1000 * error(a @ b)
