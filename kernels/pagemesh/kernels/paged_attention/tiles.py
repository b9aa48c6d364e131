"""The sizes of the tiles of the attention kernels on a GPU, by types and head width.

Tiles are limited by what a thread can hold: 255 registers for a row's queries, its mixed values and
the current K and V, and, on sm_80, 163 KB of shared memory for blocks that are being loaded. They
are chosen so that nothing spills when they are compiled ahead of time for sm_80 and sm_90
(``tests/kernels/compiled_attention.py``). On an H100, 27 or 36 tiles each were timed
(``ops.bench.gpu_tiles``) with bfloat16 queries, four to a KV head: for decode over bfloat16 64 to
256 wide and over codes 128 wide, and for prompts over bfloat16 64 and 128 wide and over int8 128
wide. The tiles here are the fastest, or within a hundredth of the fastest where that spills on
sm_80. The others were not compared, except for four for prompts over bfloat16 256 wide, on an H200.

How products are computed follows from the types, and limits the tiles most:

    product  types                          bits of a factor that count      instructions
    half     pages of 16 bits; codes with   as many as that type of 16       1
             queries of 16 bits             bits has; in weights of codes,
                                            as many as bfloat16 has
    tf32     float32 pages, queries of 16   11, as many as float16 has       1
             bits
    tf32x2   codes, float32 queries         22 of queries and weights, all   2
                                            of codes
    tf32x3   float32 both                   22, in two parts                 3

What 22 bits leave out, with ``tf32x3`` also the product of the two lower parts, is at most
2 ** -20 of a product: results are off by two to three times as much as by float32's own rounding.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from typing import Literal

import torch

from pagemesh.kernels.layout import HEAD_DIM_MAX, SCALED_DTYPES, KvDtype, PageLayout

Product = Literal["half", "tf32", "tf32x2", "tf32x3"]

PAIRS = 128
"""(row, query head) pairs in a block of a chunk's rows; a program takes all of them or a part."""
WIDTHS = (64, 128, 256, HEAD_DIM_MAX)
"""Head widths that have tiles of their own; a width in between uses those of the next larger."""
_WIDE = WIDTHS.index(256)


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program holds at a time; all numbers but the stages are powers of two."""

    rows: int
    """(row, query head) pairs."""
    block: int
    """Positions."""
    warps: int
    stages: int
    """Blocks of positions in shared memory or on their way there."""
    chunk: int = 512
    """Dimensions of a head whose queries are held; if they are fewer than the head has, queries
    are read again for every block of positions."""


_DECODE: dict[Product, tuple[Tile, ...]] = {
    "half": (Tile(16, 32, 4, 2), Tile(16, 32, 2, 2), Tile(16, 32, 2, 2), Tile(16, 32, 8, 2)),
    "tf32": (Tile(16, 32, 4, 3), Tile(16, 32, 4, 3), Tile(16, 32, 4, 2), Tile(16, 16, 4, 2)),
    "tf32x2": (
        Tile(16, 32, 4, 3), Tile(16, 32, 4, 3, 64), Tile(16, 32, 4, 2, 128), Tile(16, 16, 8, 2, 64),
    ),
    "tf32x3": (
        Tile(16, 32, 4, 3), Tile(16, 32, 4, 3), Tile(16, 32, 4, 2, 128), Tile(16, 16, 8, 2, 64),
    ),
}  # fmt: skip
_PREFILL: dict[Product, tuple[Tile, ...]] = {
    "half": (Tile(64, 32, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 8, 2), Tile(32, 32, 8, 2)),
    "tf32": (Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 16, 8, 2)),
    "tf32x3": (
        Tile(64, 16, 4, 2), Tile(32, 32, 4, 2), Tile(32, 16, 8, 2, 64), Tile(16, 16, 8, 2, 64),
    ),
}  # fmt: skip
_PREFILL_CODES: dict[Product, tuple[Tile, ...]] = {
    "half": (Tile(128, 32, 8, 3), Tile(128, 32, 8, 3), Tile(64, 64, 8, 2), Tile(32, 32, 8, 2)),
    "tf32x2": (
        Tile(64, 16, 4, 2), Tile(32, 32, 4, 2), Tile(32, 16, 8, 2, 64), Tile(16, 16, 8, 2, 64),
    ),
}  # fmt: skip
"""Every program decodes its codes in registers: the fewer programs read them, the less decoding."""
_PREFILL_WIDE = Tile(128, 32, 8, 3)
"""For pages and queries of 16 bits, 256 wide, where four warps compute a product together from
shared memory (sm_90): elsewhere its factors would not fit into registers."""


def product_of(queries: torch.dtype, pages: KvDtype) -> Product:
    """How products of float32, float16 or bfloat16 ``queries`` with ``pages`` are computed."""
    if queries is torch.float32 and pages in SCALED_DTYPES:
        return "tf32x2"
    if pages == "float32":
        return "tf32x3" if queries is torch.float32 else "tf32"
    return "half"


def decode_tile(queries: torch.dtype, layout: PageLayout, group: int, *, has_e4m3: bool) -> Tile:
    """The tile for single rows; ``group``: query heads that share a KV head, all in one tile.
    ``has_e4m3``: whether the device has instructions for e4m3."""
    return _fitted(_DECODE, queries, layout, group, has_e4m3, of_prompts=False)


def prefill_tile(
    queries: torch.dtype, layout: PageLayout, group: int, *, has_e4m3: bool, has_wide_products: bool
) -> Tile:
    """The tile for chunks of rows; ``has_wide_products``: whether the device is an sm_90."""
    is_half = queries.itemsize == 2 and layout.dtype in ("float16", "bfloat16")
    is_wide = WIDTHS[_WIDE - 1] < layout.head_dim <= WIDTHS[_WIDE] and group <= _PREFILL_WIDE.rows
    if has_wide_products and is_half and is_wide:
        return _PREFILL_WIDE
    tiles = _PREFILL_CODES if layout.is_scaled else _PREFILL
    return _fitted(tiles, queries, layout, group, has_e4m3, of_prompts=True)


def _fitted(
    tiles: dict[Product, tuple[Tile, ...]],
    queries: torch.dtype,
    layout: PageLayout,
    group: int,
    has_e4m3: bool,
    *,
    of_prompts: bool,
) -> Tile:
    width = bisect.bisect_left(WIDTHS, layout.head_dim)
    product = product_of(queries, layout.dtype)
    tile = tiles[product][width]
    by_arithmetic = layout.dtype == "e4m3" and not has_e4m3
    if by_arithmetic or (layout.is_scaled and width >= _WIDE):
        # Codes and their decoded values are in registers at the same time.
        block = 16 if width > _WIDE and of_prompts else 32
        tile = replace(tile, block=min(tile.block, block))
    if product == "half" and queries is torch.float32 and of_prompts:
        tile = replace(tile, block=32)  # queries and results are twice as large
    rows = max(tile.rows, 1 << (group - 1).bit_length())
    if rows > tile.rows and product in ("tf32x2", "tf32x3"):
        tile = replace(tile, chunk=min(tile.chunk, 64))
    return replace(tile, rows=rows)
