"""``page_copy`` on a GPU: pages as 8-byte words, many programs per page."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.triton_support import expect_device

_WORDS = 2048


@triton.jit
def _copy_words(words, pairs, page_words, block: tl.constexpr):
    pair = tl.program_id(0)
    source = tl.load(pairs + 2 * pair).to(tl.int64) * page_words
    target = tl.load(pairs + 2 * pair + 1).to(tl.int64) * page_words
    at = tl.program_id(1) * block + tl.arange(0, block)
    tl.store(
        words + target + at, tl.load(words + source + at, mask=at < page_words), at < page_words
    )


def page_copy(pool: KvPool, copies: Sequence[tuple[int, int]]) -> None:
    """See the package; pages are checked by the caller."""
    expect_device("pool", pool.memory)
    pairs = torch.tensor(copies, dtype=torch.int32).to(pool.memory.device)
    words = pool.memory.view(torch.int64)
    page_words = pool.layout.page_bytes // 8
    _copy_words[(len(copies), triton.cdiv(page_words, _WORDS))](
        words, pairs, page_words, _WORDS, num_warps=8
    )
