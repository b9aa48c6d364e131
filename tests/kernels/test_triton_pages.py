"""Triton kernels over pages, in the interpreter: what their references compute.

Few rows and small widths: the interpreter runs one program after the other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels.attend import LAYOUTS, Attend, assert_agrees
from tests.kernels.pools import SCALE, filled_pool, written_pool

from pagemesh.kernels import triton_support
from pagemesh.kernels.batch import WINDOW_TOKENS_MAX
from pagemesh.kernels.kv_write import reference as kv_write_reference
from pagemesh.kernels.kv_write import triton as kv_write_triton
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.ops import KvPool, PageLayout, RaggedBatch, ragged_batch
from pagemesh.kernels.page_copy import reference as page_copy_reference
from pagemesh.kernels.page_copy import triton as page_copy_triton
from pagemesh.kernels.paged_attention import reference
from pagemesh.kernels.paged_attention.tiles import decode_tile
from pagemesh.kernels.paged_attention.triton import (
    SPAN_TOKENS,
    attention_shape,
    paged_attention,
    span_count,
)
from pagemesh.kernels.paged_prefill.blocks import row_blocks
from pagemesh.kernels.paged_prefill.triton import paged_prefill
from pagemesh.kernels.rope_kv_write import reference as rope_kv_write_reference
from pagemesh.kernels.rope_kv_write import triton as rope_kv_write_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
BOTH: tuple[Attend, ...] = (paged_attention, paged_prefill)
EITHER = pytest.mark.parametrize("attend", BOTH, ids=["spans", "blocks"])


@pytest.mark.parametrize(("layout", "heads"), LAYOUTS)
def test_attention_is_its_reference(layout: PageLayout, heads: int) -> None:
    pool, tables = filled_pool(layout, 300, 4)
    batch = ragged_batch(tables, [0, 63, 298, 5], [1, 2, 1, 0], layout.page_size)
    assert_agrees(paged_attention, pool, batch, heads)


@pytest.mark.parametrize("position", [0, 15, 16, 63, 64, 255, 256, 511, 512, 700])
def test_attention_is_right_at_every_border_of_page_block_and_span(position: int) -> None:
    pool, tables = filled_pool(PageLayout(2, 1, 16, 16), position + 1, 1)
    batch = ragged_batch(tables, [position], [1], 16)
    assert_agrees(paged_attention, pool, batch, 2)


@pytest.mark.parametrize(("layout", "heads"), LAYOUTS)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 100), (63, 2), (200, 70), (16, 16)])
def test_prefill_is_its_reference(layout: PageLayout, heads: int, start: int, count: int) -> None:
    pool, tables = filled_pool(layout, 300, 3)
    batch = ragged_batch(tables, [start, 40, 7], [count, 0, 9], layout.page_size)
    assert_agrees(paged_prefill, pool, batch, heads)


@EITHER
@pytest.mark.parametrize("window_tokens", [1, 16, 63, 64, 65, 300, 2**31 - 1, 2**31])
@pytest.mark.parametrize("page_size", [16, 7])
def test_a_window_hides_what_is_behind_it(
    attend: Attend, window_tokens: int, page_size: int
) -> None:
    pool, tables = filled_pool(PageLayout(2, 1, 16, page_size), 300, 2)
    for table, low in zip(tables, (290 - window_tokens, 5 - window_tokens), strict=True):
        table[: max(low + 1, 0) // page_size] = 1 << 30  # not asked for: far outside
    batch = ragged_batch(tables, [290, 5], [4, 3], page_size)
    assert_agrees(attend, pool, batch, 2, window_tokens=window_tokens)


@EITHER
def test_a_cap_draws_scores_in(attend: Attend) -> None:
    pool, tables = filled_pool(PageLayout(2, 1, 16, 16), 100, 1)
    batch = ragged_batch(tables, [90], [3], 16)
    assert_agrees(attend, pool, batch, 2, soft_cap=0.5)
    assert_agrees(attend, pool, batch, 2, soft_cap=30.0, window_tokens=20)
    with pytest.raises(ValueError, match="cap above 0"):
        assert_agrees(attend, pool, batch, 2, soft_cap=0.0)


@EITHER
@pytest.mark.parametrize("dtype", ["float16", "int8", "e4m3"])
@pytest.mark.parametrize(
    ("layout", "heads"), [(PageLayout(2, 2, 32, 16), 4), (PageLayout(2, 1, 18, 7), 2)]
)
def test_pages_of_every_type_are_read_as_the_reference_reads_them(
    attend: Attend, dtype: KvDtype, layout: PageLayout, heads: int
) -> None:
    pool, tables = written_pool(replace(layout, dtype=dtype), 100, 2)
    batch = ragged_batch(tables, [70, 5], [3, 1], layout.page_size)
    assert_agrees(attend, pool, batch, heads)
    assert_agrees(attend, pool, batch, heads, window_tokens=20)


@EITHER
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("head_dim", [130, 512])
def test_heads_too_wide_to_be_held_are_read_in_parts(
    attend: Attend, dtype: KvDtype, head_dim: int
) -> None:
    """Whatever the queries are of which nothing is read again: several parts, the last cut."""
    layout = PageLayout(2, 1, head_dim, 16, dtype)
    tile = decode_tile(torch.float32, layout, 3, has_e4m3=False)
    assert tile.chunk < head_dim
    pool, tables = written_pool(layout, 100, 2)
    batch = ragged_batch(tables, [70, 5], [3, 1], 16)
    assert_agrees(attend, pool, batch, 3)


@EITHER
def test_half_queries_on_float32_pages_keep_eleven_bits(attend: Attend) -> None:
    """Closer to the reference than K and V in bfloat16 would be, and not as close as float32:
    what the instruction would cut off is cut off here, too."""
    pool, tables = filled_pool(PageLayout(2, 2, 64, 16), 100, 1)
    batch = ragged_batch(tables, [60], [5], 16)
    q = torch.randn(5, 4, 64).half()
    expected = reference.paged_attention(q.float(), pool, 1, batch, SCALE)
    got = attend(q, pool, 1, batch, SCALE, out=torch.empty(5, 4, 64))
    error = float((got - expected).norm() / expected.norm())
    rounded = KvPool(pool.layout, pool.memory.clone())
    rounded.memory.view(torch.float32).copy_(pool.memory.view(torch.float32).bfloat16())
    coarse = reference.paged_attention(q.float(), rounded, 1, batch, SCALE)
    assert 1e-5 < error < 0.6 * float((coarse - expected).norm() / expected.norm())


def test_a_row_has_the_same_bits_in_any_batch_and_with_room_for_more_spans() -> None:
    pool, tables = filled_pool(PageLayout(2, 2, 32, 16), 600, 2)
    q = torch.randn(3, 4, 32)
    alone = paged_attention(q[:1], pool, 0, ragged_batch(tables[:1], [570], [1], 16), SCALE)
    batch = ragged_batch(tables[::-1], [3, 570], [2, 1], 16)
    beside = paged_attention(q[[1, 2, 0]], pool, 0, batch, SCALE, spans=5)
    assert torch.equal(beside[2], alone[0])


def test_a_row_of_padding_reads_no_page_and_gives_zeros() -> None:
    pool, tables = filled_pool(PageLayout(2, 1, 16, 16), 64, 1)
    real = ragged_batch(tables, [40], [1], 16)
    padded = RaggedBatch(
        tables=real.tables,
        table_indptr=real.table_indptr,
        row_indptr=real.row_indptr,
        row_sequence=torch.tensor([0, 1 << 20], dtype=torch.int32),
        row_position=torch.tensor([40, -1], dtype=torch.int32),
        slots=torch.tensor([int(real.slots), -1]),
    )
    # A table of its own is not asked for: sequence 2 ** 20 would be far outside.
    q = torch.randn(2, 2, 16)
    got = paged_attention(q, pool, 0, padded, SCALE, spans=2)
    expected = reference.paged_attention(q[:1], pool, 0, real, SCALE)
    torch.testing.assert_close(got[:1], expected, rtol=1e-5, atol=3e-6)
    assert not got[1].any()


@EITHER
def test_what_lies_beyond_a_row_does_not_reach_it(attend: Attend) -> None:
    pool, tables = filled_pool(PageLayout(2, 2, 40, 16), 128, 1)
    batch = ragged_batch(tables, [67], [3], 16)
    q = torch.randn(3, 4, 40)
    clean = attend(q, pool, 1, batch, SCALE)
    last = int(tables[0][70 // 16])
    pool.keys(1)[last, :, :, 70 % 16 :] = float("nan")
    pool.values(1)[last, :, 70 % 16 :] = float("nan")
    for page in tables[0][70 // 16 + 1 :].tolist():
        pool.keys(1)[page], pool.values(1)[page] = float("nan"), float("inf")
    assert torch.equal(attend(q, pool, 1, batch, SCALE), clean)


@EITHER
@pytest.mark.parametrize("position", [0, 63, 64, 255, 256, 290])
def test_a_key_that_is_no_number_shows_in_every_row_that_sees_it_and_in_no_other(
    attend: Attend, position: int
) -> None:
    pool, tables = filled_pool(PageLayout(2, 1, 16, 16), 300, 1)
    batch = ragged_batch(tables, [288], [5], 16)
    q = torch.randn(5, 2, 16)
    pool.keys(1)[int(tables[0][position // 16]), :, 3, position % 16] = float("nan")
    for window in (WINDOW_TOKENS_MAX, 40):
        got = attend(q, pool, 1, batch, SCALE, soft_cap=30.0, window_tokens=window)
        sees = [row >= position > row - window for row in range(288, 293)]
        assert got.isnan().all(-1).all(-1).tolist() == sees
        assert got.isnan().any(-1).any(-1).tolist() == sees


@EITHER
def test_very_large_scores_do_not_overflow(attend: Attend) -> None:
    pool, tables = filled_pool(PageLayout(2, 1, 16, 16), 300, 1)
    batch = ragged_batch(tables, [290], [4], 16)
    q = torch.randn(4, 2, 16) * 1e4
    expected = reference.paged_attention(q, pool, 1, batch, SCALE)
    got = attend(q, pool, 1, batch, SCALE)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_a_block_of_rows_is_of_one_sequence_and_holds_what_a_program_takes() -> None:
    assert row_blocks(np.array([0, 70, 70, 73]), group=2).tolist() == [[70, 73], [64, 70], [0, 64]]
    assert row_blocks(np.array([0]), group=1).shape == (0, 2)
    assert row_blocks(np.array([0, 3]), group=200).tolist() == [[2, 3], [1, 2], [0, 1]]


def test_a_context_has_at_least_one_span() -> None:
    assert [span_count(tokens) for tokens in (0, 1, SPAN_TOKENS, SPAN_TOKENS + 1)] == [1, 1, 1, 2]


@pytest.mark.parametrize("dtype", ["float32", "int8", "e4m3"])
@pytest.mark.parametrize(("layout", "_heads"), LAYOUTS)
@pytest.mark.parametrize("rows", [0, 4])
def test_written_slots_hold_the_rows_and_no_others_change(
    dtype: KvDtype, layout: PageLayout, _heads: int, rows: int
) -> None:
    layout = replace(layout, dtype=dtype)
    pool = KvPool.allocate(layout, 40)
    pool.memory.random_()
    twin = KvPool(layout, pool.memory.numpy().copy())
    slots = torch.randperm(pool.page_count * layout.page_size)[:rows]
    joined = torch.randn(rows, 3, layout.kv_heads, layout.head_dim)
    joined[:1, 1:] = 0.0  # no scale
    kv_write_triton.kv_write(joined[:, 1], joined[:, 2], pool, 1, slots)
    kv_write_reference.kv_write(joined[:, 1], joined[:, 2], twin, 1, slots)
    assert torch.equal(pool.memory, twin.memory)


def test_what_is_not_finite_shows_in_its_scale() -> None:
    layout = PageLayout(1, 1, 16, 16, "int8")
    pool = KvPool.allocate(layout, 1)
    k = torch.randn(3, 1, 16)
    k[0, 0, 3], k[1, 0, 5] = float("nan"), float("inf")
    kv_write_triton.kv_write(k, k, pool, 0, torch.arange(3))
    assert pool.key_scales(0)[0, 0, :3].isfinite().tolist() == [False, False, True]
    assert pool.value_scales(0)[0, 0, :3].isnan().tolist() == [True, True, False]
    assert not pool.keys(0)[0, 0, :, :2].any()


def test_nothing_is_written_for_padding() -> None:
    pool, _ = filled_pool(PageLayout(2, 2, 16, 16), 64, 1)
    before = pool.memory.clone()
    k = torch.randn(2, 2, 16)
    joined = torch.randn(2, 6, 16)
    angles = (torch.ones(2, 8), torch.zeros(2, 8))
    slots = torch.tensor([-1, -1])
    kv_write_triton.kv_write(k, k, pool, 0, slots)
    rope_kv_write_triton.rope_kv_write(joined, angles, pool, 0, slots)
    assert torch.equal(pool.memory, before)


@pytest.mark.parametrize("dtype", ["float32", "int8", "e4m3"])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("head_dim", "heads"), [(40, 3), (6, 1)])
def test_rotated_and_written_heads_are_those_of_the_reference(
    dtype: KvDtype, with_norms: bool, head_dim: int, heads: int
) -> None:
    layout = PageLayout(2, 2, head_dim, 16, dtype)
    pool, twin = (KvPool.allocate(layout, 4) for _ in range(2))
    joined = torch.randn(5, heads + 4, head_dim)
    twin_joined = joined.clone()
    turns = torch.rand(5, head_dim // 2) * 100
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if with_norms else None
    slots = torch.tensor([33, 2, -1, 18, 47])
    angles = (turns.cos(), turns.sin())
    rope_kv_write_triton.rope_kv_write(joined, angles, pool, 1, slots, norms, 1e-6)
    rope_kv_write_reference.rope_kv_write(twin_joined, angles, twin, 1, slots, norms, 1e-6)
    torch.testing.assert_close(joined, twin_joined, rtol=1e-5, atol=1e-5)
    table = torch.arange(4, dtype=torch.int32)
    # Rounding to codes may fall either way where the rotation differs in its last bit.
    step = {"float32": 1e-5, "int8": 1 / 127, "e4m3": 1 / 8}[dtype]
    for got, expected in zip(
        reference.gather(pool, 1, table, 64), reference.gather(twin, 1, table, 64), strict=True
    ):
        largest = expected.abs().amax(-1, keepdim=True)
        assert bool(((got - expected).abs() <= step * largest + 1e-6).all())
        assert ((got - expected).abs() > 1e-4 * largest).float().mean() < 0.01


@pytest.mark.parametrize("layout", [PageLayout(3, 2, 16, 16), PageLayout(1, 1, 3, 5)])
def test_copied_pages_equal_their_sources_and_no_others_change(layout: PageLayout) -> None:
    pool, _ = filled_pool(layout, 300, 1)
    twin = KvPool(pool.layout, pool.memory.numpy().copy())
    page_copy_triton.page_copy(pool, [(1, 5), (2, 6), (1, 7)])
    page_copy_reference.page_copy(twin, [(1, 5), (2, 6), (1, 7)])
    assert torch.equal(pool.memory, twin.memory)


def test_wrong_shapes_are_refused_with_what_was_expected_and_got() -> None:
    pool, tables = filled_pool(PageLayout(2, 2, 16, 16), 32, 1)
    batch = ragged_batch(tables, [0], [1], 16)
    with pytest.raises(ValueError, match="3 query heads do not share 2 KV heads"):
        paged_attention(torch.randn(1, 3, 16), pool, 0, batch, SCALE)
    with pytest.raises(ValueError, match=r"q: expected float \[1, heads, 16\].*got .*\[2, 4, 16\]"):
        paged_prefill(torch.randn(2, 4, 16), pool, 0, batch, SCALE)
    with pytest.raises(ValueError, match="v: expected 2 heads, got 1"):
        kv_write_triton.kv_write(torch.randn(1, 2, 16), torch.randn(1, 1, 16), pool, 0, batch.slots)
    with pytest.raises(ValueError, match=r"slots: expected contiguous torch.int64 \[1\]"):
        kv_write_triton.kv_write(
            torch.randn(1, 2, 16), torch.randn(1, 2, 16), pool, 0, batch.slots.int()
        )


@pytest.mark.parametrize("pages", ["int8", "e4m3", "float16", "bfloat16"])
def test_small_weights_of_small_values_are_not_lost_to_float16(
    pages: KvDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight beside a sink, times the scale of small codes, is below what float16 knows."""
    monkeypatch.setattr(triton_support, "is_interpreted", lambda: False)
    layout = PageLayout(1, 1, 64, 16, pages)
    q = torch.zeros(1, 1, 64, dtype=torch.float16)
    at = attention_shape(
        q, KvPool.allocate(layout, 1), decode_tile(q.dtype, layout, 1, has_e4m3=True),
        scale=0.1, window_tokens=WINDOW_TOKENS_MAX, soft_cap=float("inf"),
    )  # fmt: skip
    if layout.is_scaled:
        assert (at.dot.name, at.mix.name) == ("fp16", "bf16")
    else:
        assert at.mix == at.dot
