"""How long one turn of freeing invalidated pages blocks the pager's event loop.

    python -m ops.bench.bench_invalidate [--edges 100000] [--out FILE.json]

A root holds ``--edges`` prompts of two pages that share the first page; there is no disk tier.
``call``: the invalidation, including its first turn. ``turns``: each of the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from ops.bench.hardware import describe
from ops.bench.pager_adapter import ROOT, PagerAdapter

from pagemesh.pager.events import Asked, Sweep
from pagemesh.wire.cache_messages import InvalidateCache

PAGE_SIZE = 16


def filled(edges: int) -> PagerAdapter:
    adapter = PagerAdapter(edges + 64, PAGE_SIZE)
    shared = np.zeros(PAGE_SIZE, "<u4")
    for number in range(1, edges):
        own = np.full(PAGE_SIZE, number, "<u4")
        request = adapter.prepare(np.concatenate([shared, own]).tobytes())
        adapter.match(request)
        adapter.commit(request)
        adapter.release(request)
    return adapter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--edges", type=int, default=100_000)
    parser.add_argument("--out", type=Path, help="write JSON there")
    asked = parser.parse_args()
    core = filled(asked.edges).core
    cached_pages = core.books.pool.idle
    ask = InvalidateCache(what="root", name=ROOT.hex())
    began = time.perf_counter()
    core.handle(Asked(None, ask), 1_000)
    call_ms = 1_000 * (time.perf_counter() - began)
    turns_ms: list[float] = []
    while core.is_sweeping:
        began = time.perf_counter()
        core.handle(Sweep(), 1_000)
        turns_ms.append(1_000 * (time.perf_counter() - began))
    assert not core.books.pool.idle and not core.books.forest.retired
    result = {
        "hardware": describe(),
        "edges": asked.edges,
        "pages": cached_pages,
        "call_ms": round(call_ms, 2),
        "turns": len(turns_ms),
        "turn_ms_p50": round(statistics.median(turns_ms or [0.0]), 2),
        "turn_ms_max": round(max(turns_ms, default=0.0), 2),
        "total_ms": round(call_ms + sum(turns_ms)),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
