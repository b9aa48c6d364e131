"""Contexts that few programs of attention on a GPU take in parts, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton.language as tl
from tests.kernels.attend import LAYOUTS, assert_agrees
from tests.kernels.pools import SCALE, filled_pool

from pagemesh.kernels.batch import WINDOW_TOKENS_MAX
from pagemesh.kernels.ops import PageLayout, ragged_batch
from pagemesh.kernels.paged_attention import reference
from pagemesh.kernels.paged_attention import triton as triton_attention
from pagemesh.kernels.paged_attention.triton import paged_attention
from pagemesh.kernels.paged_prefill import triton as triton_prefill
from pagemesh.kernels.paged_prefill.blocks import row_blocks, with_contexts
from pagemesh.kernels.paged_prefill.triton import paged_prefill

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.mark.parametrize("parts", [2, 16])
@pytest.mark.parametrize(("layout", "heads"), LAYOUTS)
def test_prompts_in_parts_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, layout: PageLayout, heads: int, parts: int
) -> None:
    """Contexts of less than a part, of some, and of so many that some have none of the chunk; rows
    that see nothing in the last; a window that begins behind the first."""
    monkeypatch.setattr(triton_prefill, "split_count", lambda _: parts)
    monkeypatch.setattr(triton_prefill, "_SPLIT_TOKENS_MIN", tl.constexpr(64))
    pool, tables = filled_pool(layout, 400, 3)
    batch = ragged_batch(tables, [0, 380, 190], [9, 5, 70], layout.page_size)
    assert_agrees(paged_prefill, pool, batch, heads)
    batch = ragged_batch(tables[1:2], [380], [5], layout.page_size)
    assert_agrees(paged_prefill, pool, batch, heads, window_tokens=100)


@pytest.mark.parametrize("parts", [1, 4])
def test_prompts_in_parts_leave_rows_before_them_and_padding_alone(
    monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    monkeypatch.setattr(triton_prefill, "split_count", lambda _: parts)
    monkeypatch.setattr(triton_prefill, "_SPLIT_TOKENS_MIN", tl.constexpr(64))
    pool, tables = filled_pool(PageLayout(2, 2, 40, 16), 300, 1)
    real = ragged_batch(tables, [280], [8], 16)
    far = torch.tensor([1 << 20], dtype=torch.int32)
    padded = replace(
        real,
        row_sequence=torch.cat((far, real.row_sequence, far)),
        row_position=torch.cat((far, real.row_position, -torch.ones_like(far))),
    )
    q, out = torch.randn(10, 6, 40), torch.zeros(10, 6, 40)
    out[0] = 7.0
    rows = [
        values.numpy() for values in (padded.row_position, padded.row_sequence, real.table_indptr)
    ]
    blocks = torch.from_numpy(with_contexts(row_blocks(np.array([1, 9]), group=3), *rows))
    paged_prefill(q, pool, 1, padded, SCALE, out, blocks=blocks, first_row=1)
    expected = reference.paged_attention(q[1:9], pool, 1, real, SCALE)
    torch.testing.assert_close(out[1:9], expected, rtol=1e-5, atol=3e-6)
    assert (out[0] == 7.0).all() and not out[9].any()


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("window_tokens", [WINDOW_TOKENS_MAX, 100])
def test_spans_in_pieces_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, pieces: int, window_tokens: int
) -> None:
    monkeypatch.setattr(triton_attention, "pieces_of", lambda _: pieces)
    layout = PageLayout(2, 2, 40, 16)
    pool, tables = filled_pool(layout, 600, 3)
    batch = ragged_batch(tables, [0, 570, 127], [1, 1, 2], layout.page_size)
    assert_agrees(paged_attention, pool, batch, 6, window_tokens=window_tokens)


def test_few_programs_are_made_more_and_many_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (triton_attention, triton_prefill):
        assert module.is_interpreted()
        monkeypatch.setattr(module, "is_interpreted", lambda: False)
    assert [triton_prefill.split_count(programs) for programs in (1, 8, 64, 128, 129, 5000)] == [
        32, 32, 4, 2, 1, 1,
    ]  # fmt: skip
    assert [triton_attention.pieces_of(programs) for programs in (1, 256, 257, 512, 513)] == [
        4, 4, 2, 2, 1,
    ]  # fmt: skip
