"""Decode attention at long context: how close to memory speed, and the gain of fewer bits.

    python -m ops.bench.bench_attention [--seconds 8] [--threads N] [--out PATH]

Every type of K and V has a pool of the same size in shared memory, larger than most caches, so
narrow types have more layers in it; all layers are read, as in a step. ``of_stream``: bytes of K,
V and scales that attention reads a second, relative to a plain sum over the same pool.
``over_float32``: time of a layer with float32 divided by the time with this type. Jobs take turns
in one run, so that a busy machine slows all alike; figures are medians over turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ops.bench.aims import OVER_FLOAT32, of_aim
from ops.bench.hardware import describe

from pagemesh.kernels.dispatch import native
from pagemesh.kernels.layout import KV_DTYPES, KvDtype
from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.kernels.native.superblock import Superblock
from pagemesh.kernels.ops import (
    KvPool,
    PageLayout,
    identity,
    kv_write,
    paged_attention,
    ragged_batch,
)
from pagemesh.wire.pool_format import PoolFormat

CONTEXT_TOKENS = 8192
KV_HEADS, HEAD_DIM, PAGE_SIZE = 8, 128, 16
FLOAT32_LAYERS = 8
TURNS_MIN = 5


@dataclass(frozen=True, slots=True)
class Case:
    """``batch`` sequences of ``CONTEXT_TOKENS``, with ``group`` query heads per KV head."""

    batch: int
    group: int


CASES = [Case(1, 1), Case(1, 4), Case(8, 1), Case(8, 4), Case(8, 8)]


@dataclass(frozen=True, slots=True)
class Job:
    """One type of K and V in one case: ``attend`` reads ``read_bytes`` from ``layers`` layers."""

    dtype: KvDtype
    layers: int
    pool_bytes: int
    read_bytes: int
    attend: Callable[[], object]
    stream: Callable[[], object]


def make_job(folder: Path, case: Case, dtype: KvDtype) -> Job:
    layers = FLOAT32_LAYERS // case.batch * (4 // PageLayout(1, 1, 1, 1, dtype).item_bytes)
    layout = PageLayout(layers, KV_HEADS, HEAD_DIM, PAGE_SIZE, dtype)
    pages = case.batch * CONTEXT_TOKENS // PAGE_SIZE
    pool = shared_pool(folder / f"{dtype}.pool", layout, pages)
    order = np.random.default_rng(0).permutation(pages).astype(np.uint32)
    tables = list(order.reshape(case.batch, -1))
    batch = ragged_batch(tables, [CONTEXT_TOKENS - 1] * case.batch, [1] * case.batch, PAGE_SIZE)
    q = torch.randn(case.batch, case.group * KV_HEADS, HEAD_DIM)
    out = torch.empty_like(q)

    def attend() -> None:
        for layer in range(layers):
            paged_attention(q, pool, layer, batch, HEAD_DIM**-0.5, out)

    def stream() -> object:
        floats = pool.memory.nbytes // 4
        return native().pm_probe_stream(pool.address, floats, torch.get_num_threads())

    read = layout.token_bytes * CONTEXT_TOKENS * case.batch
    return Job(dtype, layers, pool.memory.nbytes, read, attend, stream)


def shared_pool(path: Path, layout: PageLayout, page_count: int) -> KvPool:
    """A pool in a file as the pager makes it, with random K and V in every slot."""
    form = PoolFormat(page_count, layout.page_size, layout.page_bytes)
    file = PoolFile.create(path, Superblock(form, 1, layout.digest))
    pool = KvPool(layout, file.pages)
    file.remove()
    chunk = torch.randn(PAGE_SIZE * 64, 2, layout.kv_heads, layout.head_dim)
    for layer in range(layout.layers):
        for start in range(0, page_count * PAGE_SIZE, len(chunk)):
            slots = torch.arange(start, min(start + len(chunk), page_count * PAGE_SIZE))
            rows = chunk[: len(slots)]
            kv_write(rows[:, 0], rows[:, 1], pool, layer, slots)
    return pool


def take_turns(jobs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Median seconds of each job; the first turn warms up."""
    times: list[list[float]] = [[] for _ in jobs]
    end = time.monotonic() + seconds
    turn = 0
    while time.monotonic() < end or turn <= TURNS_MIN:
        for job, taken in zip(jobs, times, strict=True):
            start = time.perf_counter()
            job()
            if turn:
                taken.append(time.perf_counter() - start)
        turn += 1
    return [statistics.median(taken) for taken in times]


def measure(case: Case, dtypes: Sequence[KvDtype], seconds: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        jobs = [make_job(Path(folder), case, dtype) for dtype in dtypes]
    torch.manual_seed(0)
    taken = take_turns([work for job in jobs for work in (job.attend, job.stream)], seconds)
    lines: list[dict[str, Any]] = []
    layer_s = [taken[2 * index] / job.layers for index, job in enumerate(jobs)]
    for index, job in enumerate(jobs):
        rate = job.read_bytes / taken[2 * index]
        stream = job.pool_bytes / taken[2 * index + 1]
        lines.append(
            {
                "kv_dtype": job.dtype,
                "batch": case.batch,
                "queries_per_kv_head": case.group,
                "us_a_layer": round(layer_s[index] * 1e6, 1),
                "gb_s": round(rate / 1e9, 2),
                "stream_of_same_pool_gb_s": round(stream / 1e9, 2),
                "of_stream": round(rate / stream, 3),
                "over_float32": round(layer_s[0] / layer_s[index], 2),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=8.0, help="for each case")
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/attention.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines: list[dict[str, Any]] = []
    with torch.inference_mode():
        for case in CASES:
            for line in measure(case, KV_DTYPES, options.seconds):
                print("  ".join(f"{name} {value}" for name, value in line.items()), end="")
                aim = OVER_FLOAT32.get(line["kv_dtype"])
                stands = of_aim(line["over_float32"], aim, at_least=True) if aim else ""
                print(f"  {stands}", flush=True)
                lines.append(line)
    report = {
        "benchmark": "attention", **describe(), "threads": options.threads,
        "backend": identity(), "context_tokens": CONTEXT_TOKENS, "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "page_size": PAGE_SIZE, "results": lines,
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
