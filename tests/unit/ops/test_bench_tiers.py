"""The disk that the benchmark of tiers puts under the pager's core."""

from __future__ import annotations

import numpy as np
from ops.bench.bench_tiers import DiskPagerAdapter


def test_the_disk_answers_every_write_at_once() -> None:
    adapter = DiskPagerAdapter(64, 16)
    for number in range(12):
        request = adapter.prepare(np.full(256, number, "<u4").tobytes())
        assert adapter.match(request) == 0
        adapter.commit(request)
        adapter.release(request)
    disk = adapter.core.books.disk
    assert disk is not None and disk.page_count > 64
    assert not disk.staged, "these wait for a disk that does not answer"
