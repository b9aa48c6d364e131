"""Attention at the types, widths and groups of real models, to be compiled for a GPU.

The tests compile ``FEW``: each kind of product, each width and each group once or twice.
``python -m tests.kernels.compiled ARCH FOLDER every`` compiles ``every_attention()``, which takes
many minutes, and reports what is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from pagemesh.kernels.batch import WINDOW_TOKENS_MAX
from pagemesh.kernels.layout import KV_DTYPES, KvDtype
from pagemesh.kernels.ops import KvPool, PageLayout, ragged_batch
from pagemesh.kernels.paged_attention import triton as paged_attention
from pagemesh.kernels.paged_prefill import triton as paged_prefill

ROWS, KV_HEADS = 4, 2
QUERIES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Attention:
    """A launch of one of the two kernels. ``group``: query heads per KV head."""

    kind: Literal["decode", "prefill"]
    queries: str
    pages: KvDtype
    head_dim: int
    group: int
    window_tokens: int = WINDOW_TOKENS_MAX

    @property
    def name(self) -> str:
        windowed = ", window" if self.window_tokens < WINDOW_TOKENS_MAX else ""
        return (
            f"{self.kind}, {self.queries} on {self.pages}, {self.head_dim} wide, "
            f"groups of {self.group}{windowed}"
        )

    def launch(self) -> None:
        pool = KvPool.allocate(PageLayout(1, KV_HEADS, self.head_dim, 16, self.pages), 8)
        tables = [np.arange(8, dtype=np.uint32) for _ in range(ROWS)]
        batch = ragged_batch(tables, [100] * ROWS, [1] * ROWS, 16)
        q = torch.zeros(ROWS, KV_HEADS * self.group, self.head_dim, dtype=QUERIES[self.queries])
        if self.kind == "decode":
            paged_attention.paged_attention(
                q, pool, 0, batch, 0.1, spans=4, window_tokens=self.window_tokens
            )
        else:
            paged_prefill.paged_prefill(q, pool, 0, batch, 0.1, window_tokens=self.window_tokens)


FEW = (
    Attention("decode", "float32", "float32", 64, 1),
    Attention("decode", "float32", "float32", 128, 4),
    Attention("decode", "float32", "float32", 256, 8),
    Attention("decode", "float32", "float32", 512, 4),
    Attention("decode", "bfloat16", "float32", 128, 4),
    Attention("decode", "float32", "int8", 128, 8),
    Attention("decode", "float16", "float16", 64, 1),
    Attention("decode", "float16", "int8", 128, 4),
    Attention("decode", "bfloat16", "bfloat16", 256, 4),
    Attention("prefill", "float32", "float32", 64, 1),
    Attention("prefill", "float32", "float32", 128, 4),
    Attention("prefill", "float32", "float32", 256, 8),
    Attention("prefill", "bfloat16", "float32", 128, 4),
    Attention("prefill", "float32", "int8", 128, 4),
    Attention("prefill", "float32", "bfloat16", 128, 8),
    Attention("prefill", "float16", "float16", 64, 8),
    Attention("prefill", "float16", "e4m3", 128, 4),
    Attention("prefill", "bfloat16", "bfloat16", 256, 4),
)


def every_attention() -> list[Attention]:
    """Both kernels at all types, at widths of 64 to 512, and groups of 1, 4 and 8; those with
    a window at one width and group."""
    kinds: tuple[Literal["decode", "prefill"], ...] = ("decode", "prefill")
    found = [
        Attention(kind, queries, pages, head_dim, group)
        for kind, queries, pages, head_dim, group in itertools.product(
            kinds, QUERIES, KV_DTYPES, (64, 128, 256, 512), (1, 4, 8)
        )
        if group == 4 or (head_dim == 128 and queries != "float16")
    ]
    found += [
        Attention(kind, queries, pages, 128, 4, window_tokens=64)
        for kind, queries, pages in itertools.product(kinds, ("float32", "bfloat16"), KV_DTYPES)
    ]
    return found


def launches(which: list[Attention] | tuple[Attention, ...]) -> dict[str, Callable[[], object]]:
    """The launches, by name."""
    return {one.name: one.launch for one in which}
