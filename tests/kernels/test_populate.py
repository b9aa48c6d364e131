"""A pool's memory is mapped before anybody touches it, and stays what it was."""

from __future__ import annotations

import os
import re
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.kernels.pools import superblock

from pagemesh.engine.pool import WorkerPool
from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.kernels.native.populate import SLICE_BYTES, Populating, clear, is_memory
from pagemesh.kernels.ops import PageLayout

PAGE_COUNT, PAGE_BYTES = 40_000, 256


def mapped_bytes(path: Path) -> int:
    """Of the file at ``path``, in this process's page tables."""
    maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    found = [re.search(r"(?m)^Rss: +(\d+) kB", one) for one in maps if str(path) in one]
    return sum(1024 * int(one[1]) for one in found if one)


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.fixture
def pager() -> Iterator[PoolFile]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with PoolFile.create(Path(folder) / "a.pool", superblock(page_count=PAGE_COUNT)) as pool:
            yield pool


def test_all_of_a_pool_is_mapped_and_none_of_it_changed(pager: PoolFile) -> None:
    pager.pages[-3:] = (7, 8, 9)
    with PoolFile.attach(pager.path) as worker:
        assert worker.pages.nbytes > 8 * SLICE_BYTES
        before = mapped_bytes(pager.path)
        populating = Populating(worker.pages, eager_s=0.0, pause_s=0.0)
        assert populating.wait(30.0)
        assert mapped_bytes(pager.path) - before > 0.98 * worker.pages.nbytes
        assert worker.pages[-3:].tolist() == [7, 8, 9]
        assert not worker.pages[:-3].any()


def test_who_writes_to_what_is_mapped_does_not_wait_for_the_kernel(pager: PoolFile) -> None:
    with PoolFile.attach(pager.path) as worker:
        assert Populating(worker.pages, eager_s=60.0).wait(30.0)
        before = faults()
        worker.pages[::4096] = 1
        assert faults() - before < worker.pages.nbytes / 4096 / 20


def test_a_pool_is_cleared_by_who_makes_it_so_that_others_map_it_many_pages_at_a_time(
    pager: PoolFile,
) -> None:
    with PoolFile.attach(pager.path) as worker:
        before = faults()
        int(worker.pages[::4096].sum())
        assert faults() - before < worker.pages.nbytes / 4096 / 8


def test_clearing_stops_at_the_size_and_when_its_time_is_over(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (3 << 20))
    with path.open("r+b") as file:
        assert clear(file.fileno(), (2 << 20) + 5) == (2 << 20) + 5
        assert os.fstat(file.fileno()).st_size == 3 << 20
        assert clear(file.fileno(), 3 << 20, within_s=0.0) == 0
    found = path.read_bytes()
    assert not any(found[: (2 << 20) + 5])
    assert set(found[(2 << 20) + 5 :]) == {ord("x")}


def test_whoever_stops_it_has_the_rest_unmapped(pager: PoolFile) -> None:
    with PoolFile.attach(pager.path) as worker:
        before = mapped_bytes(pager.path)
        populating = Populating(worker.pages, eager_s=0.0, pause_s=60.0)
        populating.stop()
        assert populating.wait(30.0)
        assert mapped_bytes(pager.path) - before <= 2 * SLICE_BYTES
        assert not worker.pages.any()


def test_there_are_no_pauses_at_first_and_some_later(pager: PoolFile) -> None:
    with PoolFile.attach(pager.path) as worker:
        assert Populating(worker.pages, eager_s=60.0, pause_s=60.0).wait(30.0)
    with PoolFile.attach(pager.path) as worker:
        populating = Populating(worker.pages, eager_s=0.0, pause_s=60.0)
        assert not populating.wait(0.5)
        populating.stop()
        assert populating.wait(30.0)


def test_only_what_has_no_disk_behind_it_is_memory(pager: PoolFile) -> None:
    assert pager.is_memory
    with Path("/proc/self/status").open("rb") as file:
        assert not is_memory(file.fileno())


def test_a_worker_has_its_pool_mapped_and_one_whose_pages_are_elsewhere_does_not(
    pager: PoolFile,
) -> None:
    layout = PageLayout(layers=1, kv_heads=1, head_dim=2, page_size=16)
    assert layout.page_bytes == PAGE_BYTES
    elsewhere = torch.zeros(PAGE_COUNT * PAGE_BYTES, dtype=torch.uint8)
    for memory in (elsewhere, None):
        file = PoolFile.attach(pager.path)
        before = mapped_bytes(pager.path)
        pool = WorkerPool(file, layout, memory)
        if pool._populating is not None:
            assert pool._populating.wait(30.0)
        mapped = mapped_bytes(pager.path) - before
        assert (mapped > 0.98 * PAGE_COUNT * PAGE_BYTES) == (memory is None)
        pool.close()
