"""What matrix tiles save: steps on vectors, on tiles, and on tiles only, in turns.

    python -m ops.bench.bench_tiles [--models S M L] [--turns 15] [--out PATH]

Runs steps as in ``bench_step``, one after the other in one process: ``vectors`` at the CPU level
below tiles, ``tiles`` as workers run them, ``deterministic`` as with ``--deterministic``, where
tiles compute all rows. Ratios are medians over turns, each relative to the vectors of the same
turn. On a machine without tiles it says so.
"""

from __future__ import annotations

# isort: off
import ops.bench.as_workers  # noqa: F401  (before torch)

# isort: on
import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from ops.bench.bench_step import CONTEXT_TOKENS, Bench, Case, TimedDecoder, seconds
from ops.bench.hardware import describe

from pagemesh.engine.executor import ModelExecutor
from pagemesh.kernels.native.library import CpuLevel, cpu_level, library

CASES = (
    *(Case(f"batch {batch}", batch, 1) for batch in (1, 2, 4, 8, 16, 32)),
    *(Case(f"prompt {tokens}", 1, tokens) for tokens in (64, 128, CONTEXT_TOKENS)),
)
WAYS = {"vectors": CpuLevel.AVX512, "tiles": CpuLevel.AMX, "deterministic": CpuLevel.AMX}


class Ways:
    """The executors of one model, over the same weights and pages."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._executors = {way: self._executor(way == "deterministic") for way in WAYS}

    def _executor(self, deterministic: bool) -> ModelExecutor:
        bench = self._bench
        decoder = TimedDecoder(bench.config, bench.weights, deterministic=deterministic)
        executor = ModelExecutor(decoder, bench.pool.pages.layout)
        executor.use(bench.pool)
        return executor

    def turn(self, case: Case, step: int) -> dict[str, float]:
        """Seconds of a step, by way."""
        spent = {}
        for way, level in WAYS.items():
            library().pm_set_level(level)
            plan = self._bench.plan(case, step)
            spent[way] = seconds(lambda way=way, plan=plan: self._executors[way].run(plan))  # type: ignore[misc]
        return spent

    def close(self) -> None:
        for executor in self._executors.values():
            executor.close()


def bench_model(name: str, turns: int) -> list[dict[str, Any]]:
    lines = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        bench = Bench(name, "float32", Path(folder), rounds_rows=False)
        ways = Ways(bench)
        for case in CASES:
            count = turns if case.tokens == 1 else max(5, turns // 3)
            spent = [ways.turn(case, step) for step in range(count + 1)][1:]  # the first warms up
            line: dict[str, Any] = {"model": name, "case": case.name}
            for way in WAYS:
                median = statistics.median(turn[way] for turn in spent)
                line[f"{way}_ms"] = round(median * 1e3, 2)
                ratio = statistics.median(turn[way] / turn["vectors"] for turn in spent)
                line[f"{way}_of_vectors"] = round(ratio, 3)
            lines.append(line | {"on": describe()})
            print(
                f"{name} {case.name:<11} vectors {line['vectors_ms']:>8} ms  "
                f"tiles {line['tiles_of_vectors']:.2f}  "
                f"deterministic {line['deterministic_of_vectors']:.2f} of it",
                flush=True,
            )
        ways.close()
        bench.executor.close()
        bench.file.remove()
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["S", "M", "L"], choices=["S", "M", "L"])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/tiles.json"))
    options = parser.parse_args()
    if cpu_level() < CpuLevel.AMX:
        print(f"no matrix tiles at level {cpu_level().name.lower()}: nothing is measured")
        return 0
    lines = [line for name in options.models for line in bench_model(name, options.turns)]
    report = {"benchmark": "tiles", "context_tokens": CONTEXT_TOKENS, "results": lines}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
