"""What does the pager cost per request of a public trace, and how much does it find cached?

    python -m ops.bench.bench_pager_trace TRACE [--requests 3000] [--pages 320000] [--out PATH]

``TRACE`` is in the format of ``pagemesh replay``: ids of blocks of 512 tokens, whose tokens are
generated from the ids. Each request is admitted, extended by a page, committed and, 16 requests
later, released by the production core on one thread, as in ``bench_pager``; times are those of all
four calls, in microseconds. The first half of the requests warms up the cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from ops.bench.hardware import describe
from ops.bench.pager_adapter import LruPagerAdapter, PagerAdapter, PublishingPagerAdapter, Request

from pagemesh.cli.replaying.trace import Trace, read_trace
from pagemesh.pager import IS_COMPILED

PAGE_SIZE, BLOCK_TOKENS, WINDOW_REQUESTS = 16, 512, 16
KINDS = {"core": PagerAdapter, "lru": LruPagerAdapter, "published": PublishingPagerAdapter}


def tokens_of(prompt: tuple[int, ...]) -> bytes:
    """Packed tokens of the blocks, the same for equal ids and random otherwise."""
    blocks = [
        np.random.default_rng(number).integers(0, 150_000, BLOCK_TOKENS, np.uint32)
        for number in prompt
    ]
    return np.concatenate(blocks).tobytes()


def play(adapter: PagerAdapter, trace: Trace, request_count: int) -> dict[str, Any]:
    """Replay the trace. Requests of more pages than the pool has are skipped."""
    open_requests: deque[Request] = deque()
    spent_us, cached, asked = [], 0, 0
    pool_pages = adapter.core.books.pool.total
    for number, prompt in enumerate(trace.prompts[:request_count]):
        tokens = tokens_of(prompt)
        if len(tokens) // (4 * PAGE_SIZE) > pool_pages:
            continue
        start = time.perf_counter_ns()
        request = adapter.prepare(tokens)
        cached_pages = adapter.match(request)
        adapter.alloc(request)
        adapter.commit(request)
        open_requests.append(request)
        if len(open_requests) > WINDOW_REQUESTS:
            adapter.release(open_requests.popleft())
        if number >= request_count // 2:
            spent_us.append((time.perf_counter_ns() - start) / 1e3)
            cached += cached_pages
            asked += len(tokens) // (4 * PAGE_SIZE)
    while open_requests:
        adapter.release(open_requests.popleft())
    p50, p99 = np.percentile(spent_us, [50, 99])
    return {
        "p50_us": float(p50),
        "p99_us": float(p99),
        "mean_us": float(np.mean(spent_us)),
        "mean_prompt_tokens": asked * PAGE_SIZE / len(spent_us),
        "hit_rate": cached / asked,
        "evicted_pages": adapter.core.books.pool.evicted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--pages", type=int, default=320_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.trace is None:
        print("no trace is named: nothing is played")
        return
    trace, found = read_trace(options.trace, 1.0), {}
    request_count = min(options.requests, len(trace.prompts))
    for name, kind in KINDS.items():
        gc.collect()
        found[name] = line = play(kind(options.pages, PAGE_SIZE), trace, request_count)
        print(
            f"{name:10} p50 {line['p50_us']:6.1f} us, p99 {line['p99_us']:7.1f}, "
            f"prompts of {line['mean_prompt_tokens']:,.0f} tokens, {line['hit_rate']:.1%} cached, "
            f"{line['evicted_pages']:,} pages evicted"
        )
    if options.out is not None:
        report = {
            "on": describe(), "is_compiled": IS_COMPILED, "trace": trace.name,
            "requests": request_count, "pages": options.pages, "results": found,
        }  # fmt: skip
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
