"""What the tests of attention on a GPU share."""

from __future__ import annotations

import math
from typing import Protocol

import pytest
import torch
from tests.kernels.pools import SCALE

from pagemesh.kernels.batch import WINDOW_TOKENS_MAX
from pagemesh.kernels.ops import KvPool, PageLayout, RaggedBatch
from pagemesh.kernels.paged_attention import reference

LAYOUTS = [
    pytest.param(PageLayout(2, 2, 64, 16), 4, id="grouped"),
    pytest.param(PageLayout(2, 3, 32, 32), 3, id="one query head per KV head"),
    pytest.param(PageLayout(2, 1, 80, 16), 7, id="odd group, odd width"),
    pytest.param(PageLayout(2, 1, 18, 7), 2, id="nothing divides anything"),
    pytest.param(PageLayout(2, 1, 16, 1), 1, id="pages of one slot"),
    pytest.param(PageLayout(2, 1, 32, 128), 20, id="pages larger than a block, a large group"),
]


class Attend(Protocol):
    """The common signature of both implementations."""

    def __call__(
        self,
        q: torch.Tensor,
        pool: KvPool,
        layer: int,
        batch: RaggedBatch,
        scale: float,
        out: torch.Tensor | None = ...,
        *,
        soft_cap: float = ...,
        window_tokens: int = ...,
    ) -> torch.Tensor: ...


def assert_agrees(
    attend: Attend,
    pool: KvPool,
    batch: RaggedBatch,
    heads: int,
    *,
    soft_cap: float = math.inf,
    window_tokens: int = WINDOW_TOKENS_MAX,
) -> None:
    q = torch.randn(batch.rows, heads, pool.layout.head_dim)
    expected = reference.paged_attention(
        q, pool, 1, batch, SCALE, soft_cap=soft_cap, window_tokens=window_tokens
    )
    got = attend(q, pool, 1, batch, SCALE, soft_cap=soft_cap, window_tokens=window_tokens)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=3e-6)
