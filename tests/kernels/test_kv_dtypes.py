"""K and V kept in fewer bits: what is written, and what is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from tests.kernels.pools import SCALE, attend_rows, written_pool

from pagemesh.kernels import paged_prefill as paged_prefill_module
from pagemesh.kernels.kv_codes import CODE_DTYPES, CODE_MAX, decode, encode
from pagemesh.kernels.kv_write import reference as kv_write_reference
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import (
    KvPool,
    PageLayout,
    kv_write,
    page_copy,
    paged_attention,
    paged_prefill,
    ragged_batch,
)
from pagemesh.kernels.paged_attention import reference

DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)
NARROW: tuple[KvDtype, ...] = DTYPES[1:]
SCALED: tuple[KvDtype, ...] = ("int8", "e4m3")
SHAPES = [
    pytest.param(PageLayout(2, 2, 64, 16), 4, id="grouped"),
    pytest.param(PageLayout(2, 1, 17, 7), 2, id="nothing divides anything"),
    pytest.param(PageLayout(2, 1, 80, 32), 7, id="odd group"),
    pytest.param(PageLayout(2, 1, 33, 1), 1, id="pages of one slot"),
    pytest.param(PageLayout(2, 1, 128, 256), 40, id="large pages, more queries than a tile"),
]


# --- What is written


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("layout", "_heads"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 200])
def test_every_level_writes_the_bytes_of_the_reference(
    level: CpuLevel, layout: PageLayout, _heads: int, rows: int, dtype: KvDtype
) -> None:
    pool = KvPool.allocate(replace(layout, dtype=dtype), 300 // layout.page_size + 3)
    twin = KvPool(pool.layout, pool.memory.numpy().copy())
    slots = torch.randperm(pool.page_count * layout.page_size)[:rows]
    joined = torch.randn(rows, 3, layout.kv_heads, layout.head_dim)
    kv_write(joined[:, 1], joined[:, 2], pool, 1, slots)
    kv_write_reference.kv_write(joined[:, 1], joined[:, 2], twin, 1, slots)
    assert torch.equal(pool.memory, twin.memory)


@pytest.mark.parametrize("dtype", NARROW)
def test_rows_at_the_edges_of_float32_are_written_as_the_reference_writes_them(
    level: CpuLevel, dtype: KvDtype
) -> None:
    tiny, huge = 1.4e-45, 3.4e38
    edges = [0.0, -0.0, tiny, -tiny, 1.1754944e-38, 6.0e-8, 65519.9, 65520.0, -7e4, 448.0, huge]
    singles = torch.tensor([*edges, np.inf, -np.inf, np.nan])
    rows = singles.unsqueeze(1).repeat(1, 32)
    rows[:, 1::2] = 0.0
    bits = torch.randint(-(2**31), 2**31 - 1, (300, 32), dtype=torch.int32)
    rows = torch.cat([rows, bits.view(torch.float32), tiny * torch.randint(-300, 300, (20, 32))])
    pool = KvPool.allocate(PageLayout(1, 1, 32, 16, dtype), len(rows) // 16 + 1)
    slots = torch.arange(len(rows))
    kv_write(rows.unsqueeze(1), rows.flip(0).unsqueeze(1), pool, 0, slots)
    for written, put in [(pool.keys(0).transpose(2, 3), rows), (pool.values(0), rows.flip(0))]:
        codes, scales = encode(put, dtype)
        got = written.flatten(0, 2)[: len(rows)]
        torch.testing.assert_close(got.float(), codes.float(), rtol=0, atol=0, equal_nan=True)
        if scales is not None:
            of = pool.value_scales(0) if put is not rows else pool.key_scales(0)
            torch.testing.assert_close(
                of.flatten()[: len(rows)], scales, rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("dtype", SCALED)
def test_what_is_not_finite_shows_and_zeros_stay_zero(dtype: KvDtype) -> None:
    rows = torch.tensor([[1.0, np.inf], [np.nan, 2.0], [0.0, -0.0], [1.0, -2.0]])
    values = decode(*encode(rows, dtype))
    assert values[:2].isnan().all()
    assert torch.equal(values[2:].abs(), torch.tensor([[0.0, 0.0], values[3].abs().tolist()]))
    assert values[3, 1] == -2.0, "the largest magnitude is kept as it is"


@pytest.mark.parametrize(
    ("dtype", "of_largest", "of_value"),
    [
        ("float16", 0, 2**-11),
        ("bfloat16", 0, 2**-8),
        ("int8", 0.5 / 127, 0),
        ("e4m3", 2**-19, 2**-4),
    ],
)
def test_no_element_is_further_off_than_half_a_step(
    dtype: KvDtype, of_largest: float, of_value: float
) -> None:
    rows = torch.randn(500, 64)
    off = (decode(*encode(rows, dtype)) - rows).abs()
    largest = rows.abs().amax(-1, keepdim=True)
    assert (off <= (of_largest * largest).clamp_min(of_value * rows.abs()) * 1.0001).all()
    assert off.max() > 0


def test_copied_pages_take_their_scales_along() -> None:
    pool, _ = written_pool(PageLayout(2, 2, 16, 16, "int8"), 100, 1)
    page_copy(pool, [(1, 5)])
    for layer in range(2):
        for view in (pool.keys, pool.values, pool.key_scales, pool.value_scales):
            assert torch.equal(view(layer)[1], view(layer)[5])


# --- What is read


@pytest.mark.parametrize("dtype", NARROW)
def test_every_code_is_read_as_torch_reads_it(level: CpuLevel, dtype: KvDtype) -> None:
    width = 256 if CODE_DTYPES[dtype].itemsize == 2 else 16
    layout = PageLayout(1, 1, width, 1, dtype)
    codes = torch.arange(256 * width, dtype=torch.int32).to(
        torch.int16 if width == 256 else torch.uint8
    )
    pool = KvPool.allocate(layout, len(codes) // width)
    pool.values(0).copy_(codes.view(CODE_DTYPES[dtype]).view(pool.values(0).shape))
    if layout.is_scaled:
        pool.key_scales(0).fill_(1.0)
        pool.value_scales(0).fill_(1.0)
    tables = [np.array([page], np.uint32) for page in range(pool.page_count)]
    batch = ragged_batch(tables, [0] * len(tables), [1] * len(tables), 1)
    got = paged_attention(torch.zeros(len(tables), 1, width), pool, 0, batch, 1.0).flatten()
    expected = pool.values(0).flatten().float()
    known = ~expected.isnan() if dtype == "e4m3" else torch.ones_like(expected, dtype=torch.bool)
    torch.testing.assert_close(got[known], expected[known], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("layout", "heads"), SHAPES)
def test_attention_is_that_of_torch_on_the_values_kept(
    level: CpuLevel, layout: PageLayout, heads: int, dtype: KvDtype
) -> None:
    pool, tables = written_pool(replace(layout, dtype=dtype), 700, 4)
    batch = ragged_batch(tables, [0, 63, 510, 699], [70, 0, 5, 1], layout.page_size)
    q = torch.randn(batch.rows, heads, layout.head_dim)
    expected = reference.paged_attention(q, pool, 1, batch, SCALE)
    got = paged_attention(q, pool, 1, batch, SCALE)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("position", [0, 1, 15, 16, 63, 64, 511, 512, 1024])
def test_attention_to_narrow_values_is_right_at_every_border(
    level: CpuLevel, position: int, dtype: KvDtype
) -> None:
    pool, tables = written_pool(PageLayout(1, 2, 32, 16, dtype), position + 1, 1)
    batch = ragged_batch(tables, [position], [1], 16)
    q = torch.randn(1, 4, 32)
    expected = reference.paged_attention(q, pool, 0, batch, SCALE)
    got = paged_attention(q, pool, 0, batch, SCALE)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("layout", "heads"), SHAPES[:2])
def test_a_row_over_narrow_values_has_the_same_bits_alone_in_chunks_and_on_any_threads(
    level: CpuLevel,
    with_threads: Callable[[int], None],
    layout: PageLayout,
    heads: int,
    dtype: KvDtype,
) -> None:
    past = 2**20 // (2 * heads * layout.head_dim) + 700  # enough work for more than one thread
    pool, tables = written_pool(replace(layout, dtype=dtype), past, 2)
    q = torch.randn(40, heads, layout.head_dim)
    with_threads(1)
    whole = attend_rows(pool, tables[:1], [past - 40], [q])
    for threads in (1, 2, 3):
        with_threads(threads)
        parts = [attend_rows(pool, tables[:1], [past - 40 + at], [q[at : at + 7]]) for at in (0, 7)]
        assert torch.equal(torch.cat(parts), whole[:14]), threads
        beside = attend_rows(pool, tables[::-1], [33, past - 1], [q[:3], q[39:]])
        assert torch.equal(beside[3], whole[39]), threads


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_has_the_same_bits_however_many_share_its_k_and_v(
    level: CpuLevel, dtype: KvDtype
) -> None:
    pool, tables = written_pool(PageLayout(2, 1, 80, 16, dtype), 300, 1)
    q = torch.randn(1, 17, 80)
    heads = [q[:, at : at + 1] for at in range(17)]
    alone = torch.cat([attend_rows(pool, tables, [280], [head]) for head in heads], 1)
    for count in range(2, 18):
        together = attend_rows(pool, tables, [280], [q[:, :count]])
        assert torch.equal(together, alone[:, :count]), count


@pytest.mark.parametrize("dtype", SCALED)
def test_neither_codes_nor_scales_beyond_a_row_are_read(level: CpuLevel, dtype: KvDtype) -> None:
    pool, tables = written_pool(PageLayout(2, 2, 40, 16, dtype), 128, 1)
    q = torch.randn(70, 4, 40)
    clean = attend_rows(pool, tables, [0], [q])
    last = int(tables[0][70 // 16])
    unread = [
        (last, slice(70 % 16, 16)),
        *((page, slice(0, 16)) for page in tables[0][5:].tolist()),
    ]
    for page, slots in unread:
        pool.key_scales(1)[page, :, slots] = float("nan")
        pool.value_scales(1)[page, :, slots] = float("nan")
    assert torch.equal(attend_rows(pool, tables, [0], [q]), clean)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("layout", "heads"), SHAPES[:2])
def test_prefill_by_torch_reads_the_values_kept(
    level: CpuLevel,
    monkeypatch: pytest.MonkeyPatch,
    layout: PageLayout,
    heads: int,
    dtype: KvDtype,
) -> None:
    monkeypatch.setattr(paged_prefill_module, "torch_is_quicker", lambda: True)
    monkeypatch.setattr(paged_prefill_module, "ROWS_MIN", 1)
    pool, tables = written_pool(replace(layout, dtype=dtype), 400, 2)
    batch = ragged_batch(tables, [300, 7], [77, 9], layout.page_size)
    q = torch.randn(batch.rows, heads, layout.head_dim)
    expected = reference.paged_attention(q, pool, 0, batch, SCALE)
    got = paged_prefill(q, pool, 0, batch, SCALE)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-6)


def test_the_reference_keeps_what_encode_gives_and_no_more() -> None:
    for dtype in DTYPES:
        pool, tables = written_pool(PageLayout(1, 1, 8, 16, dtype), 40, 1)
        k, v = torch.randn(3, 1, 8), torch.randn(3, 1, 8)
        slots = torch.from_numpy(tables[0][:3].astype(np.int64)) * 16 + 5
        kv_write_reference.kv_write(k, v, pool, 0, slots)
        got_k, got_v = reference.gather(pool, 0, torch.from_numpy(tables[0].astype(np.int32)), 40)
        for page in range(3):
            assert torch.equal(got_k[0, page * 16 + 5], decode(*encode(k[page, 0], dtype)))
            assert torch.equal(got_v[0, page * 16 + 5], decode(*encode(v[page, 0], dtype)))
    assert set(CODE_MAX) == set(SCALED)
