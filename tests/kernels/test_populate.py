"""A pool's memory is mapped before anybody touches it, and stays what it was."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from tests.kernels.pools import superblock

from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.kernels.native.populate import Populating

PAGE_COUNT = 40_000


def mapped_bytes(path: Path) -> int:
    """Of the file at ``path``, in this process's page tables."""
    maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    found = [re.search(r"(?m)^Rss: +(\d+) kB", one) for one in maps if str(path) in one]
    return sum(1024 * int(one[1]) for one in found if one)


def test_all_of_a_pool_is_mapped_and_none_of_it_changed(tmp_path: Path) -> None:
    with PoolFile.create(tmp_path / "a.pool", superblock(page_count=PAGE_COUNT)) as pager:
        pager.pages[-3:] = (7, 8, 9)
        with PoolFile.attach(pager.path) as worker:
            before = mapped_bytes(pager.path)
            populating = Populating(worker.pages)
            assert populating.wait(30.0)
            assert mapped_bytes(pager.path) - before > 0.9 * worker.pages.nbytes
            assert worker.pages[-3:].tolist() == [7, 8, 9]
            assert not worker.pages[:-3].any()


def test_whoever_stops_it_has_the_memory_still(tmp_path: Path) -> None:
    memory = np.ones(1 << 24, np.uint8)
    populating = Populating(memory)
    populating.stop()
    assert populating.wait(30.0) and memory.all()
