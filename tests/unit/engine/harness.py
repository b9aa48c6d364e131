"""Sequences over a pool in private memory, driven without scheduler, pager or bus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pagemesh.engine.forward import Decoder
from pagemesh.engine.loading import load_model
from pagemesh.kernels.ops import KvPool, ragged_batch
from pagemesh.kernels.weight_types import AskedType
from pagemesh.wire.tokens import U32

PAGE_SIZE = 16


def load_decoder(
    folder: Path,
    *,
    deterministic: bool = True,
    page_size: int = PAGE_SIZE,
    weight_type: AskedType = "float32",
) -> tuple[Decoder, KvPool]:
    """A decoder and an empty pool of 256 pages for it."""
    cache = folder.parent / "cache"
    model = load_model(
        folder, name="tiny", page_size=page_size, cache=cache, weight_type=weight_type
    )
    decoder = Decoder(model.config, model.weights, deterministic=deterministic)
    return decoder, KvPool.allocate(model.layout, 256)


class Pages:
    """Hands out pages in shuffled order, so that neighbours in a page table are rarely adjacent."""

    def __init__(self, pool: KvPool, seed: int = 0) -> None:
        order = np.random.default_rng(seed).permutation(pool.page_count)
        self._free: list[int] = order.tolist()
        self._page_size = pool.layout.page_size

    def table(self, token_count: int) -> U32:
        count = -(-token_count // self._page_size)
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, np.uint32)


def logits_of(
    decoder: Decoder, pool: KvPool, rows: Sequence[tuple[U32, U32, int]]
) -> list[torch.Tensor]:
    """One forward pass of ``rows`` (page table, tokens, start); logits [tokens, vocab] of each."""
    counts = [len(tokens) for _, tokens, _ in rows]
    batch = ragged_batch(
        [table for table, _, _ in rows],
        [start for _, _, start in rows],
        counts,
        pool.layout.page_size,
    )
    tokens = np.concatenate([tokens for _, tokens, _ in rows]).astype(np.int64)
    hidden = decoder.hidden(torch.from_numpy(tokens), batch, torch.arange(batch.rows), pool)
    return list(torch.split(decoder.logits(hidden), counts))


def logits_in_chunks(
    decoder: Decoder, pool: KvPool, table: U32, tokens: U32, chunks: Sequence[int]
) -> torch.Tensor:
    """Logits [tokens, vocab] of one sequence, computed in chunks of the given sizes, and the rest
    token by token."""
    sizes = list(chunks) + [1] * (len(tokens) - sum(chunks))
    parts, start = [], 0
    for size in sizes:
        parts += logits_of(decoder, pool, [(table, tokens[start : start + size], start)])
        start += size
    return torch.cat(parts)


def some_tokens(count: int, *, vocab: int, seed: int = 0) -> U32:
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.uint32)
