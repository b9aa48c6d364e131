"""Memory of processes is told from what the kernel says of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ops.bench.bench_start import memory_mb, memory_of

ROLLUP = """\
5581a000-7ffd9000 ---p 00000000 00:00 0      [rollup]
Rss:              400000 kB
Pss:              300000 kB
Pss_Anon:         100000 kB
Pss_Shmem:        125000 kB
"""


def test_pages_of_the_pool_are_told_apart_from_the_rest() -> None:
    assert memory_mb(ROLLUP) == {"pss_mb": 307.2, "pool_mb": 128.0, "other_mb": 179.2}


def test_a_kernel_that_does_not_tell_is_named() -> None:
    with pytest.raises(ValueError, match="smaps_rollup has no Pss_Shmem"):
        memory_mb("x [rollup]\nPss: 1 kB\n")


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no /proc")
def test_a_process_that_runs_has_memory() -> None:
    assert memory_of({"me": os.getpid()})["me"]["other_mb"] > 1.0
