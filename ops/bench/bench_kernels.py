"""Kernels against the machine: the fraction of measured bandwidth and arithmetic they reach.

    python -m ops.bench.bench_kernels [--threads N] [--turns 7] [--out PATH]

``linear``: all matrix products of one step of a 135M-parameter Llama (538 MB of float32 weights).
``attention``: decode attention over a pool in shared memory, larger than any cache. ``prefill``:
attention of a chunk over its past, by our row-invariant kernel and by torch. Roofline = max(bytes /
stream bandwidth, operations / peak), both measured in the same run, in turns with the kernels; peak
is that of multiply-adds in the nearest cache or of torch's matrix product, whichever is faster. The
best turn counts on both sides, so that a busy machine distorts the ratio less. PAGEMESH_CPU_LEVEL
selects the instruction set of our kernels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from ops.bench.bench_attention import shared_pool
from ops.bench.hardware import describe

from pagemesh.kernels.dispatch import native
from pagemesh.kernels.ops import (
    KvPool,
    PackedLinear,
    PageLayout,
    identity,
    linear,
    pack_linear,
    paged_attention,
    ragged_batch,
)
from pagemesh.kernels.paged_prefill import by_torch

HIDDEN, INNER, LAYERS, VOCABULARY = 576, 1536, 30, 49_152
PRODUCTS = [(960, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)] * LAYERS
PRODUCTS.append((VOCABULARY, HIDDEN))
STREAM_FLOATS = 1 << 27
PROBE_ROUNDS = 200_000
Jobs = dict[str, Callable[[], object]]


def best_of_turns(jobs: Jobs, turns: int) -> dict[str, float]:
    """Seconds of each job's best turn; jobs take turns, after one round to warm up."""
    best = dict.fromkeys(jobs, float("inf"))
    for turn in range(turns + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if turn:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def machine_jobs() -> Jobs:
    stream, square = torch.ones(STREAM_FLOATS), torch.randn(1024, 1024)
    threads = torch.get_num_threads()
    return {
        "stream": stream.sum,
        "matmul": lambda: square @ square,
        "arithmetic": lambda: native().pm_probe_arithmetic(PROBE_ROUNDS, threads),
    }


def bench_linear(turns: int, rows_list: list[int]) -> list[dict[str, object]]:
    weights = [torch.randn(n, k) for n, k in PRODUCTS]
    packed = [pack_linear(weight) for weight in weights]
    weight_bytes = sum(4 * n * k for n, k in PRODUCTS)
    lines: list[dict[str, object]] = []
    for rows in rows_list:
        inputs = {k: torch.randn(rows, k) for _, k in PRODUCTS}
        outs = {n: torch.empty(rows, n) for n, _ in PRODUCTS}
        jobs = machine_jobs() | {
            "ours": lambda: ours(packed, inputs, outs),  # noqa: B023
            "torch": lambda: torchs(weights, inputs),  # noqa: B023
        }
        best = best_of_turns(jobs, turns)
        floor = roofline(best, weight_bytes, rows * weight_bytes // 4)
        lines.append(
            {
                "kernel": "linear",
                "rows": rows,
                "ours_ms": round(best["ours"] * 1e3, 2),
                "torch_ms": round(best["torch"] * 1e3, 2),
                "roofline_ms": round(floor * 1e3, 2),
                "of_roofline": round(floor / best["ours"], 3),
                "torch_over_ours": round(best["torch"] / best["ours"], 2),
                **rates(best),
            }
        )
    return lines


def ours(
    packed: list[PackedLinear], inputs: dict[int, torch.Tensor], outs: dict[int, torch.Tensor]
) -> None:
    for product in packed:
        linear(inputs[product.k], product, outs[product.n])


def torchs(weights: list[torch.Tensor], inputs: dict[int, torch.Tensor]) -> None:
    for weight in weights:
        torch.nn.functional.linear(inputs[weight.shape[1]], weight)


def roofline(best: dict[str, float], read_bytes: int, operations: int) -> float:
    """Seconds at the roofline; ``operations`` are multiply-adds."""
    by_memory = read_bytes / (4 * STREAM_FLOATS / best["stream"])
    return max(by_memory, operations / peak(best))


def peak(best: dict[str, float]) -> float:
    """Peak multiply-adds a second."""
    probed: int = native().pm_probe_arithmetic(PROBE_ROUNDS, torch.get_num_threads())
    return max(1024**3 / best["matmul"], probed / best["arithmetic"])


def rates(best: dict[str, float]) -> dict[str, object]:
    return {
        "stream_gb_s": round(4 * STREAM_FLOATS / best["stream"] / 1e9, 2),
        "peak_gflop_s": round(2 * peak(best) / 1e9, 1),
    }


def bench_attention(turns: int, *, group: int, contexts: list[int]) -> list[dict[str, object]]:
    """Decode attention that reads all layers of a pool, at each context length."""
    layout = PageLayout(layers=8, kv_heads=8, head_dim=128, page_size=16)
    lines: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        pool = shared_pool(Path(folder) / "bench.pool", layout, 512)
    order = np.random.default_rng(0).permutation(pool.page_count).astype(np.uint32)
    words = pool.memory.view(torch.float32)
    for context in contexts:
        sequences = pool.page_count * layout.page_size // context
        pages = context // layout.page_size
        tables = [order[i * pages : (i + 1) * pages] for i in range(sequences)]
        batch = ragged_batch(tables, [context - 1] * sequences, [1] * sequences, 16)
        q = torch.randn(sequences, group * layout.kv_heads, layout.head_dim)
        out = torch.empty_like(q)
        jobs: Jobs = {
            "stream": words.sum,
            "ours": lambda: [
                paged_attention(q, pool, layer, batch, 0.1, out)  # noqa: B023
                for layer in range(layout.layers)
            ],
        }
        best = best_of_turns(jobs, turns)
        lines.append(
            {
                "kernel": "attention",
                "context_tokens": context,
                "sequences": sequences,
                "queries_per_kv_head": group,
                "gb_s": round(words.nbytes / best["ours"] / 1e9, 2),
                "stream_of_same_pool_gb_s": round(words.nbytes / best["stream"] / 1e9, 2),
                "of_roofline": round(best["stream"] / best["ours"], 3),
            }
        )
    return lines


def bench_prefill(turns: int) -> list[dict[str, object]]:
    layout = PageLayout(layers=1, kv_heads=8, head_dim=128, page_size=16)
    pool = KvPool.allocate(layout, 600)
    pool.memory.view(torch.float32).normal_()
    lines: list[dict[str, object]] = []
    table = np.random.default_rng(0).permutation(pool.page_count).astype(np.uint32)
    for start, rows, group in [(0, 512, 4), (2048, 512, 4), (8192, 512, 4), (2048, 512, 1)]:
        batch = ragged_batch([table], [start], [rows], layout.page_size)
        q = torch.randn(rows, 8 * group, 128)
        jobs = machine_jobs() | {
            "ours": lambda: paged_attention(q, pool, 0, batch, 0.1),  # noqa: B023
            "torch": lambda: by_torch(q, pool, 0, batch.tables, start, 0.1),  # noqa: B023
        }
        best = best_of_turns(jobs, turns)
        operations = 2 * 128 * 8 * group * (rows * start + rows * (rows + 1) // 2)
        floor = roofline(best, 0, operations)
        lines.append(
            {
                "kernel": "prefill",
                "past_tokens": start,
                "rows": rows,
                "queries_per_kv_head": group,
                "row_invariant_ms": round(best["ours"] * 1e3, 2),
                "by_torch_ms": round(best["torch"] * 1e3, 2),
                "roofline_ms": round(floor * 1e3, 2),
                "row_invariant_of_roofline": round(floor / best["ours"], 3),
                "by_torch_of_roofline": round(floor / best["torch"], 3),
            }
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/kernels.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        lines = bench_attention(options.turns, group=1, contexts=[8192, 1024, 128])
        lines += bench_attention(options.turns, group=4, contexts=[8192, 1024, 128])
        lines += bench_prefill(options.turns)
        lines += bench_linear(options.turns, [1, 2, 4, 8, 16, 32, 64, 512])
    for line in lines:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    report = {
        "benchmark": "kernels", **describe(), "threads": options.threads,
        "backend": identity(), "results": lines,
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
