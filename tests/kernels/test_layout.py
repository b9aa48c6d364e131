"""The page layout: arithmetic, identity and the views over a pool."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.layout import PageLayout

PLAIN = PageLayout(layers=3, kv_heads=2, head_dim=5, page_size=4)


def test_a_page_holds_k_and_v_of_every_layer_and_ends_on_a_cache_line() -> None:
    assert PLAIN.token_bytes == 3 * 2 * 2 * 5 * 4
    assert PLAIN.page_bytes == 960
    assert replace(PLAIN, page_size=3).page_bytes == 768, "720, padded"
    assert PageLayout(80, 8, 128, 16).token_bytes == 2 * 320 * 1024, "twice its 2-byte figure"


def test_every_field_is_part_of_the_digest() -> None:
    others = [
        replace(PLAIN, layers=4),
        replace(PLAIN, kv_heads=3),
        replace(PLAIN, head_dim=6),
        replace(PLAIN, page_size=5),
        replace(PLAIN, group=1),
    ]
    assert len({layout.digest for layout in [PLAIN, *others]}) == 6
    assert len(PLAIN.digest) == 32
    assert replace(PLAIN).digest == PLAIN.digest


def test_the_views_cover_every_word_of_a_page_once() -> None:
    pool = KvPool.allocate(PLAIN, 3)
    for layer in range(PLAIN.layers):
        pool.keys(layer).add_(1)
        pool.values(layer).add_(1)
    words = pool.memory.view(torch.float32).view(3, PLAIN.page_stride)
    used = PLAIN.layers * PLAIN.layer_stride
    assert (words[:, :used] == 1).all()
    assert (words[:, used:] == 0).all()


def test_a_page_is_one_run_of_bytes_and_k_is_transposed_in_it() -> None:
    pool = KvPool.allocate(PLAIN, 2)
    pool.keys(1)[1, 0, 3, 2] = 7.0
    words = pool.memory.view(torch.float32)
    at = PLAIN.page_stride + PLAIN.layer_stride + 3 * PLAIN.page_size + 2
    assert words.nonzero().flatten().tolist() == [at]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((0, 2, 5, 4), "layers is 0"),
        ((3, 0, 5, 4), "kv_heads is 0"),
        ((3, 2, 0, 4), "head_dim is 0"),
        ((3, 2, 5, 0), "page_size is 0"),
        ((3, 2, 513, 4), "at most 512"),
    ],
)
def test_a_layout_no_kernel_takes_is_refused(shape: tuple[int, int, int, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PageLayout(*shape)


def test_memory_that_is_not_whole_writable_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="not whole pages of 960 bytes"):
        KvPool(PLAIN, np.zeros(961, np.uint8))
    frozen = np.zeros(960, np.uint8)
    frozen.setflags(write=False)
    with pytest.raises(ValueError, match="writable"):
        KvPool(PLAIN, frozen)
