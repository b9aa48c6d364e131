"""Small pools for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pagemesh.kernels.native.header_writer import HeaderWriter
from pagemesh.kernels.native.headers import HeaderTable
from pagemesh.kernels.native.superblock import Superblock
from pagemesh.kernels.ops import KvPool, PageLayout, kv_write, paged_attention, ragged_batch
from pagemesh.wire.pool_format import HeaderState, PoolFormat
from pagemesh.wire.tokens import U32, pack, pack_extents

PAGE_SIZE = 16
SCALE = 0.2
"""The scale of attention scores."""


def filled_pool(layout: PageLayout, tokens: int, sequences: int) -> tuple[KvPool, list[U32]]:
    """A pool of random K and V (float32), and shuffled page tables of ``tokens`` slots per
    sequence."""
    pool, tables = _empty_pool(layout, tokens, sequences)
    pool.memory.view(torch.float32).normal_()
    return pool, tables


def written_pool(layout: PageLayout, tokens: int, sequences: int) -> tuple[KvPool, list[U32]]:
    """Like ``filled_pool`` for any dtype: random K and V are written to every slot. All slots have
    different magnitudes, so that a wrong scale shows."""
    pool, tables = _empty_pool(layout, tokens, sequences)
    slots = torch.arange(pool.page_count * layout.page_size)
    for layer in range(layout.layers):
        k, v = (torch.randn(len(slots), layout.kv_heads, layout.head_dim) for _ in range(2))
        k *= torch.rand(len(slots), layout.kv_heads, 1) + 0.1
        v *= torch.rand(len(slots), layout.kv_heads, 1) + 0.1
        kv_write(k, v, pool, layer, slots)
    return pool, tables


def _empty_pool(layout: PageLayout, tokens: int, sequences: int) -> tuple[KvPool, list[U32]]:
    pages = -(-tokens // layout.page_size)
    pool = KvPool.allocate(layout, pages * sequences + 3)
    order = np.random.default_rng(0).permutation(pool.page_count).astype(np.uint32)
    return pool, [order[i * pages : (i + 1) * pages] for i in range(sequences)]


def attend_rows(
    pool: KvPool, tables: Sequence[U32], starts: list[int], q: list[torch.Tensor]
) -> torch.Tensor:
    """Attention in layer 1 of the rows ``q`` of each sequence, from position ``starts`` on."""
    batch = ragged_batch(tables, starts, [len(rows) for rows in q], pool.layout.page_size)
    return paged_attention(torch.cat(q), pool, 1, batch, SCALE)


def superblock(page_count: int = 64, *, page_bytes: int = 256) -> Superblock:
    return Superblock(PoolFormat(page_count, PAGE_SIZE, page_bytes), 0xABCD, b"layout!!" * 4)


def pool_path(folder: Path, name: str = "test") -> Path:
    return folder / f"{name}.pool"


def write_headers(
    table: HeaderTable,
    pages: Sequence[int],
    *,
    sequence: int,
    state: HeaderState = HeaderState.HELD,
    mark: int = 1,
    until_ms: int | None = None,
) -> None:
    """Write headers whose every word is derived from ``mark``, so that two marks differ in all
    words. Identities count up from ``1000 * mark + 1``."""
    count = len(pages)
    HeaderWriter(table).write(
        pack_extents(pages), state, np.full(count, sequence, np.uint64).tobytes(),
        writer=1000 * mark + 3, root=mark, first_identity=1000 * mark + 1, parent=1000 * mark + 2,
        tokens=pack([mark] * count * table.form.page_size),
        until_ms=1000 * mark + 4 if until_ms is None else until_ms,
    )  # fmt: skip
