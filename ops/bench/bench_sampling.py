"""The sampler's time per step: greedy, with a temperature, and with limits, penalties and
log-probabilities.

    python -m ops.bench.bench_sampling [--threads N] [--turns 60] [--before REPORT] [--out PATH]

The logits of a batch of rows are where a model step leaves them. ``greedy`` is temperature 0,
``temperature`` is 1, and the others are temperature 1 with limits; ``read`` reads the logits once,
which is the roofline. ``repetition`` has a penalty on the tokens of prompt and answer,
``frequency`` two penalties on those of the answer, and a bias; ``logprobs`` report that many
alternatives; all of these are greedy. ``by_numpy`` computes the same row by row in numpy, as before
the native library did (``tests/unit/engine/plain_sampler.py``). Texts grow by a token each turn.
All take turns, and medians are reported, so that a busy machine slows all alike. Logits are those
of a fairly certain model: normally distributed, with a standard deviation of 3. ``--before`` copies
an earlier report of this script, of another commit, into the new one.
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
from numpy.typing import NDArray
from ops.bench.hardware import describe
from tests.unit.engine.plain_sampler import plain_draw

from pagemesh.engine.sampler import draw
from pagemesh.engine.worker.plan import Drawn, Sample
from pagemesh.kernels.dispatch import native, use_threads
from pagemesh.kernels.ops import identity
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.work_messages import Sampling

ROWS, VOCABULARIES, SPREAD = (1, 8, 32), (49_152, 151_936), 3.0
PROMPT_TOKENS, CONTEXT_TOKENS, WARM_UP = 300, 600, 3
WAYS = {
    "greedy": Sampling(temperature=0.0, max_tokens=64),
    "temperature": Sampling(temperature=1.0, max_tokens=64),
    "top_p": Sampling(temperature=1.0, top_p=0.95, max_tokens=64),
    "top_k": Sampling(temperature=1.0, top_k=50, max_tokens=64),
    "min_p": Sampling(temperature=1.0, min_p=0.05, max_tokens=64),
    "top_p_top_k": Sampling(temperature=1.0, top_p=0.95, top_k=50, max_tokens=64),
}
EDITED_AND_REPORTED = {
    "repetition": Sampling(temperature=0.0, repetition_penalty=1.05, max_tokens=64),
    "frequency": Sampling(
        temperature=0.0, frequency_penalty=0.5, presence_penalty=0.5,
        logit_bias={token: -1.0 for token in range(20)}, max_tokens=64,
    ),
    "logprobs_5": Sampling(temperature=0.0, logprobs=5, max_tokens=64),
    "logprobs_20": Sampling(temperature=0.0, logprobs=20, max_tokens=64),
}  # fmt: skip
Draw = Callable[[NDArray[np.float32], NDArray[np.int64], list[Sample]], tuple[Drawn, ...]]


class Texts:
    """``count`` sequences that grow by a token each time they are sampled from."""

    def __init__(self, sampling: Sampling, count: int, vocab: int, turns: int) -> None:
        random = np.random.default_rng(1)
        whole = random.integers(vocab, size=(count, CONTEXT_TOKENS + turns)).astype(np.uint32)
        keys = [SequenceKey(request=f"{row:032x}", attempt=1, choice=0) for row in range(count)]
        own = [row.copy() for row in whole]
        self._turns = iter(
            [
                [
                    Sample(key, sampling, tokens[: CONTEXT_TOKENS + turn], PROMPT_TOKENS)
                    for key, tokens in zip(keys, own, strict=True)
                ]
                for turn in range(turns)
            ]
        )

    def draw_by(self, way: Draw, logits: NDArray[np.float32]) -> Callable[[], object]:
        rows = np.arange(len(logits))
        return lambda: way(logits, rows, next(self._turns))


def medians_us(jobs: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    spent: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(turns + WARM_UP):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if turn >= WARM_UP:
                spent[name].append(time.perf_counter() - start)
    return {name: statistics.median(own) * 1e6 for name, own in spent.items()}


def measure(vocab: int, count: int, threads: int, turns: int) -> dict[str, object]:
    random = np.random.default_rng(0)
    logits = random.normal(0.0, SPREAD, (count, vocab)).astype(np.float32)
    jobs: dict[str, Callable[[], object]] = {
        "read": lambda: native().pm_probe_stream(logits.ctypes.data, logits.size, threads),
    }
    for name, sampling in (WAYS | EDITED_AND_REPORTED).items():
        jobs[name] = Texts(sampling, count, vocab, turns + WARM_UP).draw_by(draw, logits)
        if name in EDITED_AND_REPORTED:
            texts = Texts(sampling, count, vocab, turns + WARM_UP)
            jobs[f"{name}_by_numpy"] = texts.draw_by(plain_draw, logits)
    took = medians_us(jobs, turns)
    return {
        "vocab": vocab,
        "rows": count,
        **{f"{name}_us": round(us, 1) for name, us in took.items()},
        "temperature_over_greedy": round(took["temperature"] / took["greedy"], 2),
        "top_p_over_temperature": round(took["top_p"] / took["temperature"], 2),
        "top_p_top_k_over_temperature": round(took["top_p_top_k"] / took["temperature"], 2),
        **{
            f"{name}_over_greedy": round(took[name] / took["greedy"], 2)
            for name in EDITED_AND_REPORTED
        },
        **{
            f"numpy_over_{name}": round(took[f"{name}_by_numpy"] / took[name], 2)
            for name in EDITED_AND_REPORTED
        },
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
