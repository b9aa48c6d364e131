"""What the sampler takes for a step: greedy, with a temperature, and with limits beside it.

    python -m ops.bench.bench_sampling [--threads N] [--turns 60] [--before REPORT] [--out PATH]

The logits of so many rows lie where a model step leaves them. ``greedy`` is temperature 0,
``temperature`` is 1, and the others are temperature 1 within limits; ``read`` reads the logits
once, which is the roofline. All take turns; medians, so that what a busy machine adds falls on all
alike. Logits are those of a model that is fairly sure: normal, with a spread of 3. ``--before``
keeps an earlier report of this script, of another commit, in the new one.
"""

from __future__ import annotations

# isort: off
import ops.bench.as_workers  # noqa: F401  (before torch)

# isort: on
import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from ops.bench.hardware import describe

from pagemesh.engine.sampler import draw
from pagemesh.engine.worker.plan import Sample
from pagemesh.kernels.dispatch import native, use_threads
from pagemesh.kernels.ops import identity
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.work_messages import Sampling

ROWS, VOCABULARIES, SPREAD = (1, 8, 32), (49_152, 151_936), 3.0
PROMPT_TOKENS, CONTEXT_TOKENS = 300, 600
WAYS = {
    "greedy": Sampling(temperature=0.0, max_tokens=64),
    "temperature": Sampling(temperature=1.0, max_tokens=64),
    "top_p": Sampling(temperature=1.0, top_p=0.95, max_tokens=64),
    "top_k": Sampling(temperature=1.0, top_k=50, max_tokens=64),
    "min_p": Sampling(temperature=1.0, min_p=0.05, max_tokens=64),
    "top_p_top_k": Sampling(temperature=1.0, top_p=0.95, top_k=50, max_tokens=64),
}


def samples_of(sampling: Sampling, count: int) -> list[Sample]:
    context = np.zeros(CONTEXT_TOKENS, np.uint32)
    keys = [SequenceKey(request=f"{index:032x}", attempt=1, choice=0) for index in range(count)]
    return [Sample(key, sampling, context, PROMPT_TOKENS) for key in keys]


def medians_us(jobs: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    spent: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(turns + 3):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if turn >= 3:  # the first warm up
                spent[name].append(time.perf_counter() - start)
    return {name: statistics.median(own) * 1e6 for name, own in spent.items()}


def measure(vocab: int, count: int, threads: int, turns: int) -> dict[str, object]:
    random = np.random.default_rng(0)
    logits = random.normal(0.0, SPREAD, (count, vocab)).astype(np.float32)
    rows = np.arange(count)
    jobs: dict[str, Callable[[], object]] = {
        "read": lambda: native().pm_probe_stream(logits.ctypes.data, logits.size, threads),
    }
    for name, sampling in WAYS.items():
        own = samples_of(sampling, count)
        jobs[name] = lambda own=own: draw(logits, rows, own)  # type: ignore[misc]
    took = medians_us(jobs, turns)
    return {
        "vocab": vocab,
        "rows": count,
        **{f"{name}_us": round(us, 1) for name, us in took.items()},
        "temperature_over_greedy": round(took["temperature"] / took["greedy"], 2),
        "top_p_over_temperature": round(took["top_p"] / took["temperature"], 2),
        "top_p_top_k_over_temperature": round(took["top_p_top_k"] / took["temperature"], 2),
        "of_roofline": round(took["read"] / took["temperature"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/sampling.json"))
    options = parser.parse_args()
    use_threads(options.threads)
    lines = [
        measure(vocab, count, options.threads, options.turns)
        for vocab in VOCABULARIES
        for count in ROWS
    ]
    for line in lines:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    report: dict[str, object] = {
        "benchmark": "sampling", **describe(), "threads": options.threads,
        "backend": identity(), "results": lines,
    }  # fmt: skip
    if options.before:
        report["before"] = json.loads(options.before.read_text())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
