"""Pages written, attended to and copied: against plain torch, and bit for bit among themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.pools import SCALE, attend_rows, filled_pool

from pagemesh.kernels import paged_prefill as paged_prefill_module
from pagemesh.kernels.kv_write import reference as kv_write_reference
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import (
    KvPool,
    PageLayout,
    RaggedBatch,
    kv_write,
    page_copy,
    paged_attention,
    paged_prefill,
    ragged_batch,
)
from pagemesh.kernels.page_copy import reference as page_copy_reference
from pagemesh.kernels.paged_attention import reference
from pagemesh.kernels.paged_prefill import by_torch

SHAPES = [
    pytest.param(PageLayout(2, 2, 64, 16), 4, id="grouped"),
    pytest.param(PageLayout(2, 3, 128, 32), 3, id="one query head per KV head"),
    pytest.param(PageLayout(2, 1, 80, 16), 7, id="one KV head, odd group"),
    pytest.param(PageLayout(2, 2, 20, 8), 4, id="pages smaller than a vector"),
    pytest.param(PageLayout(2, 1, 17, 7), 2, id="nothing divides anything"),
    pytest.param(PageLayout(2, 1, 16, 1), 1, id="pages of one slot"),
    pytest.param(PageLayout(2, 1, 32, 256), 40, id="large pages, more queries than a tile"),
]


@pytest.mark.parametrize(("layout", "heads"), SHAPES)
def test_attention_is_that_of_torch(level: CpuLevel, layout: PageLayout, heads: int) -> None:
    pool, tables = filled_pool(layout, 700, 4)
    starts, counts = [0, 63, 510, 699], [70, 0, 5, 1]
    batch = ragged_batch(tables, starts, counts, layout.page_size)
    q = torch.randn(batch.rows, heads, layout.head_dim)
    expected = reference.paged_attention(q, pool, 1, batch, SCALE)
    got = paged_attention(q, pool, 1, batch, SCALE)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("position", [0, 1, 15, 16, 63, 64, 65, 511, 512, 513, 1024, 1300])
def test_attention_is_right_at_every_border(level: CpuLevel, position: int) -> None:
    pool, tables = filled_pool(PageLayout(2, 2, 32, 16), position + 1, 1)
    batch = ragged_batch(tables, [position], [1], 16)
    q = torch.randn(1, 4, 32)
    expected = reference.paged_attention(q, pool, 0, batch, SCALE)
    got = paged_attention(q, pool, 0, batch, SCALE)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("layout", "heads"), SHAPES)
def test_a_row_has_the_same_bits_alone_in_chunks_and_in_batches(
    level: CpuLevel, with_threads: Callable[[int], None], layout: PageLayout, heads: int
) -> None:
    pool, tables = filled_pool(layout, 720, 2)
    first, count = 490, 200
    q = torch.randn(count, heads, layout.head_dim)
    other = torch.randn(3, heads, layout.head_dim)
    whole = attend_rows(pool, tables[:1], [first], [q])
    for threads in (1, 3):
        with_threads(threads)
        assert torch.equal(attend_rows(pool, tables[:1], [first], [q]), whole), threads
        for row in (0, 31, 32, 100, 199):
            alone = attend_rows(pool, tables[:1], [first + row], [q[row : row + 1]])
            assert torch.equal(alone[0], whole[row]), (threads, row)
            beside = attend_rows(pool, tables[::-1], [700, first + row], [other, q[row : row + 1]])
            assert torch.equal(beside[3], whole[row]), (threads, row)
        for size in (7, 33, 190):
            parts = [
                attend_rows(pool, tables[:1], [first + at], [q[at : at + size]])
                for at in range(0, 100, size)
            ]
            joined = torch.cat(parts)[:100]
            assert torch.equal(joined, whole[: len(joined)]), (threads, size)


@pytest.mark.parametrize(("layout", "heads"), SHAPES)
def test_a_row_over_a_long_past_has_the_same_bits_on_any_number_of_threads(
    level: CpuLevel, with_threads: Callable[[int], None], layout: PageLayout, heads: int
) -> None:
    past = 2**20 // (2 * heads * layout.head_dim) + 700  # enough work for more than one thread
    pool, tables = filled_pool(layout, past, 2)
    q = torch.randn(2, heads, layout.head_dim)
    with_threads(1)
    alone = attend_rows(pool, tables[:1], [past - 1], [q[:1]])
    both = attend_rows(pool, tables, [past - 1, past // 2], [q[:1], q[1:]])
    for threads in (2, 3):
        with_threads(threads)
        assert torch.equal(attend_rows(pool, tables[:1], [past - 1], [q[:1]]), alone), threads
        got = attend_rows(pool, tables, [past - 1, past // 2], [q[:1], q[1:]])
        assert torch.equal(got, both), threads
    assert torch.equal(both[:1], alone)


@pytest.mark.parametrize(("layout", "heads"), SHAPES)
@pytest.mark.parametrize("shared", [1090, 640, 513, 130])
def test_sequences_that_begin_with_the_same_pages_have_the_bits_that_each_has_alone(
    level: CpuLevel,
    with_threads: Callable[[int], None],
    layout: PageLayout,
    heads: int,
    shared: int,
) -> None:
    pool, tables = filled_pool(layout, 1200, 6)
    common = shared // layout.page_size
    prefixed = [np.concatenate((tables[0][:common], own[common:])) for own in tables[:5]]
    # The second ends a span of 512 after its neighbours. One that shares nothing comes between
    # them, and one of two rows at the end.
    batch = [prefixed[0], prefixed[1], prefixed[2], tables[5], prefixed[3], prefixed[4]]
    starts, counts = [1020, 1199, 1010, 900, shared, 1100], [1, 1, 1, 1, 1, 2]
    q = [torch.randn(count, heads, layout.head_dim) for count in counts]
    with_threads(1)
    alone = [
        attend_rows(pool, [table], [start], [rows])
        for table, start, rows in zip(batch, starts, q, strict=True)
    ]
    for threads in (1, 2, 3):
        with_threads(threads)
        assert torch.equal(attend_rows(pool, batch, starts, q), torch.cat(alone)), threads


def test_slots_beyond_a_row_are_never_read(level: CpuLevel) -> None:
    layout = PageLayout(2, 2, 40, 16)
    pool, tables = filled_pool(layout, 128, 1)
    q = torch.randn(70, 4, 40)
    clean = attend_rows(pool, tables, [0], [q])
    last = int(tables[0][70 // 16])
    pool.keys(1)[last, :, :, 70 % 16 :] = float("nan")
    pool.values(1)[last, :, 70 % 16 :] = float("nan")
    for page in tables[0][70 // 16 + 1 :].tolist():
        pool.keys(1)[page] = float("nan")
        pool.values(1)[page] = float("inf")
    assert torch.equal(attend_rows(pool, tables, [0], [q]), clean)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFFFFFFF], ids=["quiet", "all ones"])
@pytest.mark.parametrize("position", [0, 15, 63, 64, 511, 512, 690])
def test_a_key_that_is_no_number_shows_in_every_row_that_sees_it_and_in_no_other(
    level: CpuLevel, with_threads: Callable[[int], None], position: int, bits: int
) -> None:
    pool, tables = filled_pool(PageLayout(2, 2, 32, 16), 700, 1)
    batch = ragged_batch(tables, [0], [700], 16)
    last = ragged_batch(tables, [699], [1], 16)
    q = torch.randn(700, 4, 32)
    attend_near = functools.partial(paged_attention, soft_cap=3.0, window_tokens=20)
    clean = paged_attention(q, pool, 1, batch, SCALE)
    near = attend_near(q, pool, 1, batch, SCALE)
    one = torch.tensor([bits - 2**32 if bits >= 2**31 else bits]).int().view(torch.float32)
    pool.keys(1)[int(tables[0][position // 16]), :, 5, position % 16] = one
    for threads in (1, 3):
        with_threads(threads)
        got = paged_attention(q, pool, 1, batch, SCALE)
        assert torch.equal(got[:position], clean[:position])
        assert got[position:].isnan().all()
        assert paged_attention(q[699:], pool, 1, last, SCALE).isnan().all()
        got = attend_near(q, pool, 1, batch, SCALE)
        assert torch.equal(got[:position], near[:position])
        assert got[position : position + 20].isnan().all()
        assert torch.equal(got[position + 20 :], near[position + 20 :])


@pytest.mark.parametrize("heads", [2, 14])
@pytest.mark.parametrize("position", [0, 5, 63, 64, 100, 129])
def test_a_value_that_is_no_number_shows_in_every_row_that_sees_it_and_in_no_other(
    level: CpuLevel, position: int, heads: int
) -> None:
    # Rows of a chunk share its last block, of which each sees another part.
    pool, tables = filled_pool(PageLayout(2, 2, 32, 16), 130, 1)
    batch = ragged_batch(tables, [0], [130], 16)
    q = torch.randn(130, heads, 32)
    clean = paged_attention(q, pool, 1, batch, SCALE)
    for value in (float("nan"), float("inf")):
        pool.values(1)[int(tables[0][position // 16]), :, position % 16] = value
        got = paged_attention(q, pool, 1, batch, SCALE)
        assert torch.equal(got[:position], clean[:position])
        assert not got[position:].isfinite().any()


@pytest.mark.parametrize("position", [100, 511, 4795])
def test_a_key_that_is_no_number_shows_through_a_long_past_on_any_number_of_threads(
    level: CpuLevel, with_threads: Callable[[int], None], position: int
) -> None:
    pool, tables = filled_pool(PageLayout(2, 2, 32, 16), 4796, 1)
    pool.keys(1)[int(tables[0][position // 16]), :, :, position % 16] = float("nan")
    batch = ragged_batch(tables, [4795], [1], 16)
    q = torch.randn(1, 4, 32)
    for threads in (1, 2, 3):
        with_threads(threads)
        for window in (4796, 4796 - 511):
            got = paged_attention(q, pool, 1, batch, SCALE, window_tokens=window)
            assert got.isnan().all() == (position >= 4796 - window), (threads, window)


def test_very_large_scores_do_not_overflow(level: CpuLevel) -> None:
    pool, tables = filled_pool(PageLayout(2, 1, 16, 16), 600, 1)
    batch = ragged_batch(tables, [590], [10], 16)
    q = torch.randn(10, 2, 16) * 1e4
    expected = reference.paged_attention(q, pool, 1, batch, SCALE)
    got = paged_attention(q, pool, 1, batch, SCALE)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_rows_of_a_sequence_may_come_in_any_order(level: CpuLevel) -> None:
    pool, tables = filled_pool(PageLayout(2, 2, 32, 16), 600, 1)
    q = torch.randn(40, 4, 32)
    batch = ragged_batch(tables, [560], [40], 16)
    ordered = paged_attention(q, pool, 1, batch, SCALE)
    back = RaggedBatch(
        batch.tables,
        batch.table_indptr,
        batch.row_indptr,
        batch.row_sequence,
        batch.row_position.flip(0).contiguous(),
        batch.slots,
    )
    assert torch.equal(
        paged_attention(q.flip(0).contiguous(), pool, 1, back, SCALE).flip(0), ordered
    )


@pytest.mark.parametrize(("layout", "heads"), SHAPES)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 100), (5, 1), (300, 77), (16, 16)])
@pytest.mark.parametrize("rows_min", [1, 10, None], ids=["torch", "both", "own"])
def test_prefill_agrees_with_the_reference_by_either_way(
    monkeypatch: pytest.MonkeyPatch,
    layout: PageLayout,
    heads: int,
    start: int,
    count: int,
    rows_min: int | None,
) -> None:
    monkeypatch.setattr(paged_prefill_module, "torch_is_quicker", lambda: rows_min is not None)
    monkeypatch.setattr(paged_prefill_module, "ROWS_MIN", rows_min)
    pool, tables = filled_pool(layout, 400, 2)
    batch = ragged_batch(tables, [start, 7], [count, 9], layout.page_size)
    q = torch.randn(batch.rows, heads, layout.head_dim)
    expected = reference.paged_attention(q, pool, 0, batch, SCALE)
    got = paged_prefill(q, pool, 0, batch, SCALE)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(("start", "rows"), [(0, 128), (4096, 128), (4096, 127)])
def test_torch_gets_the_chunks_that_it_is_quicker_at(
    level: CpuLevel, monkeypatch: pytest.MonkeyPatch, start: int, rows: int
) -> None:
    layout = PageLayout(1, 1, 16, 16)
    pool, tables = filled_pool(layout, start + rows, 1)
    batch = ragged_batch(tables, [start], [rows], layout.page_size)
    given = []

    def noted(*arguments: Any) -> torch.Tensor:
        given.append(arguments)
        return by_torch(*arguments)

    monkeypatch.setattr(paged_prefill_module, "by_torch", noted)
    paged_prefill(torch.randn(rows, 2, 16), pool, 0, batch, SCALE)
    assert len(given) == (rows == 128 and level is CpuLevel.PORTABLE)


@pytest.mark.parametrize(("layout", "_heads"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 200])
def test_written_slots_hold_the_rows_and_no_others_change(
    layout: PageLayout, _heads: int, rows: int
) -> None:
    pool, _ = filled_pool(layout, 300, 1)
    twin = KvPool(layout, pool.memory.numpy().copy())
    slots = torch.randperm(pool.page_count * layout.page_size)[:rows]
    joined = torch.randn(rows, 3, layout.kv_heads, layout.head_dim)
    kv_write(joined[:, 1], joined[:, 2], pool, 1, slots)
    kv_write_reference.kv_write(joined[:, 1], joined[:, 2], twin, 1, slots)
    assert torch.equal(pool.memory, twin.memory)


def test_copied_pages_equal_their_sources_and_no_others_change() -> None:
    pool, _ = filled_pool(PageLayout(3, 2, 16, 16), 300, 1)
    twin = KvPool(pool.layout, pool.memory.numpy().copy())
    page_copy(pool, [(1, 5), (2, 6), (1, 7)])
    page_copy_reference.page_copy(twin, [(1, 5), (2, 6), (1, 7)])
    page_copy(pool, [])
    assert torch.equal(pool.memory, twin.memory)


def test_pages_outside_of_the_pool_are_refused_before_anything_is_touched(
    level: CpuLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = PageLayout(2, 2, 16, 16)
    pool, tables = filled_pool(layout, 100, 1)
    before = pool.memory.clone()
    k = torch.randn(2, 2, 16)
    for slot in (-1, pool.page_count * 16, 1 << 40):
        with pytest.raises(IndexError, match=f"slot {slot} of row 1"):
            kv_write(k, k, pool, 0, torch.tensor([3, slot]))
    with pytest.raises(IndexError, match="outside"):
        page_copy(pool, [(0, 1), (0, pool.page_count)])
    q = torch.randn(1, 2, 16)
    for wrong in (-1, pool.page_count):
        broken = tables[0].astype(np.int64)
        broken[2] = wrong
        batch = ragged_batch([broken.astype(np.uint32)], [40], [1], 16)
        for by_torch_too in (True, False):
            is_quicker = functools.partial(bool, by_torch_too)
            monkeypatch.setattr(paged_prefill_module, "torch_is_quicker", is_quicker)
            monkeypatch.setattr(paged_prefill_module, "ROWS_MIN", 1)
            for attend in (paged_attention, paged_prefill):
                with pytest.raises(IndexError, match="page"):
                    attend(q, pool, 0, batch, SCALE)
    assert torch.equal(pool.memory, before)


def test_a_page_table_too_short_for_its_rows_is_refused() -> None:
    table = np.arange(2, dtype=np.uint32)
    with pytest.raises(ValueError, match="2 pages of 16 slots, too few for positions 30 to 33"):
        ragged_batch([table], [30], [3], 16)
    assert ragged_batch([table], [30], [2], 16).slots.tolist() == [30, 31]
    assert ragged_batch([], [], [], 16).rows == 0


def test_a_row_beyond_its_page_table_is_refused_and_does_not_go_on_in_the_next_one(
    level: CpuLevel,
) -> None:
    pool, tables = filled_pool(PageLayout(2, 2, 16, 16), 100, 2)
    batch = ragged_batch(tables, [111, 50], [1, 1], 16)
    q = torch.randn(2, 2, 16)
    paged_attention(q, pool, 0, batch, SCALE)
    batch.row_position[0] += 1  # the first of a page more than there are
    with pytest.raises(IndexError, match="row 0 at position 112 of sequence 0 has no page"):
        paged_attention(q, pool, 0, batch, SCALE)
    with pytest.raises(IndexError, match="row 0 at position 112 of sequence 0 has no page"):
        paged_attention(q, pool, 0, batch, SCALE, window_tokens=1)


def test_wrong_shapes_are_refused_with_what_was_expected_and_got() -> None:
    pool, tables = filled_pool(PageLayout(2, 2, 16, 16), 32, 1)
    batch = ragged_batch(tables, [0], [1], 16)
    with pytest.raises(ValueError, match="3 query heads do not share 2 KV heads"):
        paged_attention(torch.randn(1, 3, 16), pool, 0, batch, SCALE)
    with pytest.raises(ValueError, match=r"q: .* \[1, heads, 16\], got torch.float32 \[2, 4, 16\]"):
        paged_attention(torch.randn(2, 4, 16), pool, 0, batch, SCALE)
    with pytest.raises(ValueError, match=r"k: .* float32 \[1, heads, 16\], got .*\[1, 2, 8\]"):
        kv_write(torch.randn(1, 2, 8), torch.randn(1, 2, 8), pool, 0, batch.slots)
    with pytest.raises(ValueError, match="v: expected 2 heads, got 1"):
        kv_write(torch.randn(1, 2, 16), torch.randn(1, 1, 16), pool, 0, batch.slots)
