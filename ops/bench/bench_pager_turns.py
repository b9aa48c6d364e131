"""Did a change make the pager faster? Runs two checkouts in turns, so a busy machine slows both.

    python -m ops.bench.bench_pager_turns BEFORE [--loads small,evicting] [--runs 4] [--turns 10]
        [--out ops/bench/results/pager_turns.json]

BEFORE is another checkout of this repository with its native library built, and with its core
compiled if and only if this checkout's is (``services/compile_cores.py``); otherwise nothing is
measured. For each load of ``bench_pager``, a run starts a process for each checkout with the
default eviction policy, and one with ``lru`` for this checkout; they take turns of 120 requests on
one core. Reported are the medians over turns of the times and of the ratios. Each run starts new
processes, since the placement of their memory makes a difference of some per cent; and after eleven
turns, the pools from which nothing is evicted would be full.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import numpy as np

WARM_REQUESTS, TURN_REQUESTS, TURNS_MAX = 120, 120, 11
ROOT = Path(__file__).parents[2]
_SOURCES = (".", "services", "shared", "kernels")
Turn = list[float]
"""Fifth percentile, median and mean of the requests of a turn, in microseconds."""


def serve(kind_name: str, load_name: str) -> None:
    """Be one side: run a turn for each line of standard input. Imports come from the side's own
    checkout."""
    from ops.bench import bench_pager
    from ops.bench.pager_adapter import LruPagerAdapter, PagerAdapter

    import pagemesh.pager

    [load] = [one for one in bench_pager.LOADS if one.name == load_name]
    subject = bench_pager.Subject(LruPagerAdapter if kind_name == "lru" else PagerAdapter, load)
    subject.turn(WARM_REQUESTS)
    gc.collect()
    gc.freeze()
    print(json.dumps(getattr(pagemesh.pager, "IS_COMPILED", False)), flush=True)
    for _ in sys.stdin:
        subject._times_us.clear()
        subject.turn(TURN_REQUESTS)
        taken = subject._times_us
        told = (float(np.percentile(taken, 5)), statistics.median(taken), statistics.mean(taken))
        print(json.dumps(told), flush=True)


class Side:
    """One checkout, policy and load, in a process of its own."""

    def __init__(self, tree: Path, kind_name: str, load_name: str) -> None:
        path = ":".join(str(tree / part) for part in _SOURCES)
        core = max(os.sched_getaffinity(0))
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind_name, load_name],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, cwd=tree, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )  # fmt: skip
        told = self._out.readline()
        assert told, f"{tree} does not serve {load_name}"
        self.is_compiled: bool = json.loads(told)

    @property
    def _out(self) -> TextIO:
        assert self._process.stdout is not None
        return self._process.stdout  # type: ignore[return-value]

    def turn(self) -> Turn:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        told: Turn = json.loads(self._out.readline())
        return told

    def end(self) -> None:
        self._process.communicate()


def measure(before: Path, load_name: str, run_count: int, turn_count: int) -> dict[str, list[Turn]]:
    """The turns of all runs, by side."""
    sides = {"before": (before, "core"), "after": (ROOT, "core"), "lru": (ROOT, "lru")}
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for _ in range(run_count):
        serving = {name: Side(tree, kind, load_name) for name, (tree, kind) in sides.items()}
        if serving["before"].is_compiled != serving["after"].is_compiled:
            compiled, other = (before, ROOT) if serving["before"].is_compiled else (ROOT, before)
            raise SystemExit(
                f"the core of {compiled} is compiled and that of {other} is not: run "
                f"services/compile_cores.py in {other}"
            )
        for number in range(turn_count):
            for name in turn_order(list(sides), number):
                turns[name].append(serving[name].turn())
        for side in serving.values():
            side.end()
    return turns


def turn_order(names: list[str], number: int) -> list[str]:
    """The order of turn ``number``: each time another side goes first, and none goes twice in a
    row, which would let it find its own memory in the processor's caches."""
    at = number % len(names)
    return names[at:] + names[:at]


def summary(turns: dict[str, list[Turn]]) -> dict[str, dict[str, float]]:
    """By side: the medians of the times and of the ratios to ``before``."""
    found = {}
    for name, own in turns.items():
        line: dict[str, float] = {}
        for at, which in enumerate(("p5", "p50", "mean")):
            pairs = zip(own, turns["before"], strict=True)
            line[f"{which}_us"] = round(statistics.median(turn[at] for turn in own), 2)
            line[f"{which}_ratio"] = round(statistics.median(a[at] / b[at] for a, b in pairs), 3)
        found[name] = line
    return found


def commit_of(tree: Path) -> str:
    """The commit of checkout ``tree``, with a plus sign if files differ from it."""
    told = [
        subprocess.run(["git", "-C", tree, *what], capture_output=True, text=True, check=True)
        for what in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "-uno"])
    ]
    return told[0].stdout.strip() + ("+" if told[1].stdout.strip() else "")


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("--loads", default="small,large,evicting,short")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.before is None:
        print("no other checkout is named: nothing is measured")
        return
    if options.turns > TURNS_MAX:
        parser.error(f"--turns: at most {TURNS_MAX}")
    before, results = options.before.resolve(), {}
    commit = commit_of(before)
    for name in options.loads.split(","):
        turns = measure(before, name, options.runs, options.turns)
        results[name] = {"summary": summary(turns), "turns": turns}
        for side, line in summary(turns).items():
            print(f"{name:9} {side:7}", ", ".join(f"{key} {line[key]}" for key in line))
    if options.out is not None:
        from ops.bench.hardware import describe

        report = {"on": describe(), "before": commit, "results": results}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
