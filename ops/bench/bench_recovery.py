"""How long is the cache unavailable when its pager dies? A new one rebuilds it from the headers.

    python -m ops.bench.bench_recovery [--pages 1000000] [--out ops/bench/results/recovery.json]

A pool file is filled as a pager would have left it at its death, with one root:

    prompts     that share prefixes: edges of 384 and 128 pages, each contiguous in memory
    scattered   the same, but no page is adjacent to its neighbour in the edge
    answers     64 at a time; each page is committed by itself and adjacent to those of the others

Then, the steps of a restart:

    adopt     lock and map the file
    scan      copy out and check every header (native)
    rebuild   edges, ledger and free pages: the core handles ``Recovered``
    perform   the writes that the core then asks for

Keyed ids for the routers' index are made afterwards, a part at a time; they are not included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from ops.bench.aims import of_aim
from ops.bench.hardware import describe

from pagemesh.kernels.native.header_writer import HeaderWriter
from pagemesh.pager.eviction import make_policy
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.state import PagerCore
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.runtime.settings import PagerConfig
from pagemesh.wire.pager_messages import PoolSpec
from pagemesh.wire.pool_format import EPOCH_SHIFT, HeaderState
from pagemesh.wire.tokens import U32, pack_extents

PAGE_SIZE, PAGE_BYTES = 16, 64
PREFIX_PAGES, SUFFIX_PAGES, SUFFIXES, BESIDE = 384, 128, 5, 64
KINDS = ("prompts", "scattered", "answers")
ROOT = bytes(range(32))
AIM_S = 2.0


class Filled:
    """Commits the pages of a pool, one edge after the other."""

    def __init__(self, store: PoolStore, pages: U32) -> None:
        self._writer = HeaderWriter(store.file.headers)
        self._pages = pages
        self._tokens = np.random.default_rng(7)
        self._at = 0
        self._number = store.facts.epoch << EPOCH_SHIFT

    @property
    def left(self) -> int:
        return len(self._pages) - self._at

    def edge(self, count: int, parent: int) -> int:
        """Commit ``count`` more pages after the one with identity ``parent``. Returns the last."""
        count = min(count, self.left)
        pages = self._pages[self._at : self._at + count]
        self._at += count
        first = self._number + 1
        self._number += 2 * count
        tokens = self._tokens.integers(0, 1 << 17, count * PAGE_SIZE, np.uint32).tobytes()
        self._writer.write(
            pack_extents(pages), HeaderState.COMMITTED, range(first, first + count), writer=9,
            root=0, first_identity=first + count, parent=parent, tokens=tokens,
        )  # fmt: skip
        return self._number


def fill(store: PoolStore, page_count: int, kind: str) -> None:
    """Commit ``page_count`` pages of the pool."""
    store.file.headers.store_root(0, ROOT, live=True)
    pages = np.arange(page_count, dtype="<u4")
    if kind == "scattered":
        pages = pages.reshape(-1, BESIDE).T.ravel().copy()
    filled = Filled(store, pages)
    while kind == "answers" and filled.left:
        parents = [0] * BESIDE
        for _ in range(SUFFIX_PAGES):
            parents = [filled.edge(1, parent) for parent in parents if filled.left]
    while filled.left:
        prefix = filled.edge(PREFIX_PAGES, 0)
        for _ in range(SUFFIXES):
            if filled.left:
                filled.edge(SUFFIX_PAGES, prefix)


def restart(folder: Path) -> dict[str, float]:
    """The seconds of each step of a restart."""
    times = [time.perf_counter()]
    store = PoolStore.adopt(folder, "bench")
    times.append(time.perf_counter())
    found = store.recovered(store.scan(), ())
    times.append(time.perf_counter())
    policy = make_policy(PagerConfig().eviction, store.facts.page_count)
    core = PagerCore(PagerLimits(), store.facts, policy)
    commands = core.handle(found, 0)
    times.append(time.perf_counter())
    for command in commands:
        store.perform(command)
    times.append(time.perf_counter())
    names = ("adopt_s", "scan_s", "rebuild_s", "perform_s")
    result = {n: after - before for n, (before, after) in zip(names, pairwise(times), strict=True)}
    pool = core.books.pool
    assert pool.idle + pool.free == pool.total, "pages were not believed"
    store.close()
    return {**result, "total_s": times[-1] - times[0], "cached_pages": float(pool.idle)}


def measure(page_count: int, kind: str, repeats: int) -> dict[str, float]:
    """Medians over restarts of one pool."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        folder = Path(name)
        spec = PoolSpec(layout_digest=ROOT, page_size=PAGE_SIZE, page_bytes=PAGE_BYTES)
        store = PoolStore.create(folder, "bench", spec, page_count * PAGE_BYTES)
        fill(store, page_count, kind)
        store.close()
        runs = [restart(folder) for _ in range(repeats)]
    assert all(run["cached_pages"] == page_count for run in runs), "the cache is not as warm"
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    page_count = options.pages // BESIDE * BESIDE
    results = {kind: measure(page_count, kind, options.repeats) for kind in KINDS}
    for name, found in results.items():
        parts = "  ".join(f"{key[:-2]} {found[key]:.3f}" for key in found if key.endswith("_s"))
        aim = AIM_S * page_count / 1_000_000
        print(f"{name:10} {page_count:,} pages, seconds: {parts}; {of_aim(found['total_s'], aim)}")
    if options.out is not None:
        report = {"machine": describe(), "aim_s_per_million": AIM_S, "results": results}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
