"""Attention that sees a window of the past, or caps its scores."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.kernels.pools import SCALE, written_pool

from pagemesh.kernels.batch import RaggedBatch
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import KvPool, PageLayout, paged_attention, ragged_batch
from pagemesh.kernels.paged_attention import reference

BORDERS = [0, 1, 15, 16, 63, 64, 511, 512, 640, 1300]


def both_ways(
    q: torch.Tensor, pool: KvPool, batch: RaggedBatch, soft_cap: float, window_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernel and by plain torch."""
    more = {"soft_cap": soft_cap, "window_tokens": window_tokens}
    return (
        paged_attention(q, pool, 1, batch, SCALE, **more),  # type: ignore[arg-type]
        reference.paged_attention(q, pool, 1, batch, SCALE, **more),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 500, 512, 1300, 5000])
def test_a_row_sees_a_window_of_its_past(level: CpuLevel, window: int, dtype: KvDtype) -> None:
    pool, tables = written_pool(PageLayout(2, 2, 32, 16, dtype), 1301, 1)
    batch = ragged_batch(tables * len(BORDERS), BORDERS, [1] * len(BORDERS), 16)
    q = torch.randn(batch.rows, 4, 32)
    got, expected = both_ways(q, pool, batch, math.inf, window)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [1, 40, 64, 512])
@pytest.mark.parametrize(
    ("layout", "heads"),
    [
        pytest.param(PageLayout(2, 2, 64, 16), 4, id="grouped"),
        pytest.param(PageLayout(2, 1, 17, 7), 2, id="nothing divides anything"),
        pytest.param(PageLayout(2, 1, 32, 256), 40, id="large pages, many queries"),
    ],
)
def test_under_a_window_a_row_has_the_same_bits_alone_and_in_chunks(
    level: CpuLevel,
    with_threads: Callable[[int], None],
    layout: PageLayout,
    heads: int,
    window: int,
) -> None:
    pool, tables = written_pool(layout, 1000, 1)
    first, count = 490, 300
    q = torch.randn(count, heads, layout.head_dim)

    def rows(low: int, high: int) -> torch.Tensor:
        batch = ragged_batch(tables, [first + low], [high - low], layout.page_size)
        return paged_attention(q[low:high], pool, 1, batch, SCALE, window_tokens=window)

    with_threads(1)
    whole = rows(0, count)
    for threads in (1, 3):
        with_threads(threads)
        assert torch.equal(rows(0, count), whole), threads
        for row in (0, 21, 22, 150, 299):
            assert torch.equal(rows(row, row + 1)[0], whole[row]), (threads, row)
        assert torch.equal(torch.cat([rows(at, at + 50) for at in range(0, 300, 50)]), whole)


def test_a_window_spread_over_threads_is_that_of_one_thread(
    level: CpuLevel, with_threads: Callable[[int], None]
) -> None:
    pool, tables = written_pool(PageLayout(2, 1, 128, 16), 6000, 1)
    batch = ragged_batch(tables, [5990], [1], 16)
    q = torch.randn(1, 2, 128)
    with_threads(1)
    alone = paged_attention(q, pool, 1, batch, SCALE, window_tokens=4500)
    with_threads(3)
    spread, expected = both_ways(q, pool, batch, math.inf, 4500)
    assert torch.equal(spread, alone)
    torch.testing.assert_close(spread, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("page_size", [7, 16])
def test_pages_before_the_window_may_be_gone(level: CpuLevel, page_size: int) -> None:
    layout = PageLayout(2, 2, 32, page_size)
    pool, tables = written_pool(layout, 700, 1)
    batch = ragged_batch(tables, [650], [20], page_size)
    q = torch.randn(20, 4, 32)
    whole = paged_attention(q, pool, 1, batch, SCALE, window_tokens=100)
    seen_first = (650 + 1 - 100) // page_size
    gone: NDArray[np.int64] = tables[0].astype(np.int64)
    gone[:seen_first] = pool.page_count + 5
    batch = ragged_batch([gone.astype(np.uint32)], [650], [20], page_size)
    assert torch.equal(paged_attention(q, pool, 1, batch, SCALE, window_tokens=100), whole)
    with pytest.raises(IndexError, match="row 0 at position 650"):
        paged_attention(q, pool, 1, batch, SCALE, window_tokens=100 + page_size)


@pytest.mark.parametrize("layout", [PageLayout(2, 2, 32, 7), PageLayout(2, 2, 32, 16, "e4m3")])
def test_rows_far_apart_need_nothing_between_their_windows(
    level: CpuLevel, layout: PageLayout
) -> None:
    # What lies between is read, and not only its address taken, where K is copied or has scales.
    pool, tables = written_pool(layout, 700, 1)
    table = tables[0].copy()
    table[48 // layout.page_size : 640 // layout.page_size] = pool.page_count + 50_000
    batch = ragged_batch([tables[0]], [0], [700], layout.page_size)
    picked = torch.tensor([3, 40, 41, 690])
    q = torch.randn(700, 2, 32)
    far = RaggedBatch(
        torch.from_numpy(table.astype(np.int32)),
        batch.table_indptr,
        torch.tensor([0, 4], dtype=torch.int32),
        batch.row_sequence[picked],
        batch.row_position[picked],
        batch.slots[picked],
    )
    got = paged_attention(q[picked], pool, 1, far, SCALE, window_tokens=20)
    whole = paged_attention(q, pool, 1, batch, SCALE, window_tokens=20)
    assert torch.equal(got, whole[picked])


@pytest.fixture(scope="module")
def strays(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], int]:
    """How many fetches of one row, at a position and with a window, lie outside of all pages."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = Path(__file__).with_name("fetch_probe.cpp")
    target = tmp_path_factory.mktemp("probe") / "probe.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC"]
    command = [compiler, *flags, str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count = ctypes.CDLL(str(target)).probe_strays
    count.argtypes, count.restype = [ctypes.c_long] * 2, ctypes.c_long
    return lambda position, window: int(count(position, window))


def test_what_is_fetched_ahead_lies_in_pages(strays: Callable[[int, int], int]) -> None:
    found = {
        (position, window): count
        for position in (63, 127, 170, 191, 700)
        for window in (*range(1, 140), 10_000)
        if (count := strays(position, window))
    }
    assert not found


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0, 1e6])
@pytest.mark.parametrize("dtype", ["float32", "e4m3"])
def test_scores_are_capped(level: CpuLevel, dtype: KvDtype, soft_cap: float) -> None:
    pool, tables = written_pool(PageLayout(2, 2, 32, 16, dtype), 700, 1)
    batch = ragged_batch(tables, [600], [70], 16)
    q = torch.randn(70, 4, 32) * 20
    got, expected = both_ways(q, pool, batch, soft_cap, 90)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    if soft_cap < 100:
        free, _ = both_ways(q, pool, batch, math.inf, 90)
        assert (free - got).abs().max() > 1e-2, "this cap tells"


@pytest.mark.parametrize(("soft_cap", "window"), [(0.0, 5), (-1.0, 5), (math.nan, 5), (1.0, 0)])
def test_caps_and_windows_that_mean_nothing_are_refused(soft_cap: float, window: int) -> None:
    pool, tables = written_pool(PageLayout(1, 1, 16, 16), 16, 1)
    batch = ragged_batch(tables, [3], [1], 16)
    with pytest.raises(ValueError, match="expected a cap above 0 and a window"):
        paged_attention(
            torch.randn(1, 1, 16), pool, 0, batch, 1.0, soft_cap=soft_cap, window_tokens=window
        )
