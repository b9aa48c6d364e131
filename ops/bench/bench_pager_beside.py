"""What does a prefix index with its pages cost per request, here and in other projects?

    python -m ops.bench.bench_pager_beside --peers FOLDER [--rounds 5]
        [--out ops/bench/results/pager_beside.json]

The peers are those installed in FOLDER: ``pip install --no-deps --target FOLDER sglang==0.5.23
ai-dynamo-runtime==1.6.1 orjson pybase64`` (``pager_peers`` says which parts of them are timed, and
which of their imports are stubbed). ``--peers`` may be repeated. Missing peers are reported and
left out.

Each round runs each of them once, one after the other, in a process of its own, on one core and one
thread; the order is reversed from round to round. *Cold* prompts share nothing; three quarters of
each *hot* prompt are the cached prefix of a cold one. Some prompts stay pinned, and nothing is
evicted. Times are those of all calls of a request and of the release that is due, in microseconds;
the reported ratio is the median of the rounds' ratios. Our pager is driven as in ``bench_pager``:
beyond what the others do, it handles leases, an order of sequences, an extension and answers.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ops.bench.hardware import describe
from ops.bench.pager_adapter import PagerAdapter
from ops.bench.pager_peers import PEERS, import_from

PAGE_SIZE, PREFIX_TOKENS, SUFFIX_TOKENS = 16, 6_144, 2_048
COLD_COUNT, HOT_COUNT, PINNED_COUNT = 200, 1_000, 16
POOL_PAGES = 400_000
WHAT = (
    "prefix indexes and page allocators in one process, one thread, one core, in turns; cold: "
    f"{COLD_COUNT} prompts of {PREFIX_TOKENS + SUFFIX_TOKENS} tokens that share nothing, then "
    f"hot: {HOT_COUNT} of which {PREFIX_TOKENS} tokens are cached, drawn from those; "
    f"{PINNED_COUNT} stay pinned, pool of {POOL_PAGES} pages of {PAGE_SIZE} tokens, nothing is "
    "evicted; microseconds of all calls of a request"
)
OURS = "pagemesh"
_MODULES = {"sglang-rust": "sglang", "sglang-py": "sglang", "dynamo": "dynamo"}
_PACKAGES = {"sglang": "sglang", "dynamo": "ai-dynamo-runtime"}


def prompts() -> Iterator[tuple[str, NDArray[np.int32]]]:
    """All prompts of a run in order, each with its phase; the same for every index."""
    dice = np.random.default_rng(11)
    numbers = [*range(COLD_COUNT), *dice.integers(0, COLD_COUNT, HOT_COUNT).tolist()]
    for at, number in enumerate(numbers):
        # Generated anew each time: if kept, they would count as memory of the index.
        prefix = _draw(np.random.default_rng([11, number]), PREFIX_TOKENS)
        phase = "cold" if at < COLD_COUNT else "hot"
        yield phase, np.concatenate([prefix, _draw(dice, SUFFIX_TOKENS)])


def _draw(dice: np.random.Generator, count: int) -> NDArray[np.int32]:
    return dice.integers(0, 150_000, count, np.int32)


def measure(kind: Any) -> dict[str, float]:
    """One run, in this process, of ``kind``, which has the interface of ``PagerAdapter``. Raises
    ``AssertionError`` when it does not hit exactly what is cached."""
    kind(64, PAGE_SIZE)  # what is imported and made once is not the index's memory
    gc.collect()
    before_bytes = _resident_bytes()
    index = kind(POOL_PAGES, PAGE_SIZE)
    gc.collect()
    gc.freeze()
    times_us: dict[str, list[float]] = {"cold": [], "hot": []}
    cpu_us = {"cold": 0.0, "hot": 0.0}
    pinned: deque[Any] = deque()
    for phase, drawn in prompts():
        tokens = index.native(drawn)
        cpu_start, start = time.process_time_ns(), time.perf_counter_ns()
        request = index.prepare(tokens)
        matched_pages = index.match(request)
        index.alloc(request)
        index.commit(request)
        pinned.append(request)
        if len(pinned) > PINNED_COUNT:
            index.release(pinned.popleft())
        times_us[phase].append((time.perf_counter_ns() - start) / 1e3)
        cpu_us[phase] += (time.process_time_ns() - cpu_start) / 1e3
        wanted_pages = PREFIX_TOKENS // PAGE_SIZE if phase == "hot" else 0
        assert matched_pages == wanted_pages, f"{kind.name}: {matched_pages} pages are cached"
    while pinned:
        index.release(pinned.popleft())
    del tokens, drawn, request
    gc.collect()
    grown_bytes = _resident_bytes() - before_bytes
    return {
        "cold_p50_us": round(statistics.median(times_us["cold"]), 2),
        "hot_p50_us": round(statistics.median(times_us["hot"]), 2),
        "hot_cpu_us": round(cpu_us["hot"] / HOT_COUNT, 2),
        "index_bytes_a_cached_page": round(grown_bytes / index.cached_pages(), 1),
    }


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def versions() -> dict[str, str]:
    """The indexes to compare, each with its version."""
    found = {OURS: "PagerCore, default eviction, as ops/bench/pager_adapter.py drives it"}
    for name in PEERS:
        module = _MODULES[name]
        if importlib.util.find_spec(module) is None:
            print(f"{name} is left out: no {module} in --peers")
            continue
        package = _PACKAGES[module]
        summary = " ".join((PEERS[name].__doc__ or "").split())
        found[name] = f"{package} {importlib.metadata.version(package)}: {summary}"
    return found


def play(name: str, peers: list[str]) -> dict[str, float]:
    """One run in a process of its own, on the last core that this process may use."""
    core = max(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "ops.bench.bench_pager_beside", "--one", name]
    command += [part for folder in peers for part in ("--peers", folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}), check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-2_000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import_from([Path(folder).resolve() for folder in options.peers])
    if options.one:
        kind = PagerAdapter if options.one == OURS else PEERS[options.one]
        print(json.dumps(measure(kind)))
        return
    found, rounds = versions(), list[dict[str, dict[str, float]]]()
    for number in range(options.rounds):
        names = list(found) if number % 2 else list(found)[::-1]
        rounds.append({name: play(name, options.peers) for name in names})
    ratios = {}
    for name in [one for one in found if one != OURS]:
        ratios[name] = {
            phase: round(statistics.median(_ratio(one, name, phase) for one in rounds), 3)
            for phase in ("cold", "hot")
        }
    for name in found:
        seen = {key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]}
        print(f"{name:12}", ", ".join(f"{key} {value:.1f}" for key, value in seen.items()))
    print(f"median ratio of {OURS}: {ratios}")
    if options.out is not None:
        report = {
            "on": describe(), "what": WHAT, "versions": found, "rounds": rounds,
            "median_ratio_of_pagemesh": ratios,
        }  # fmt: skip
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def _ratio(one: dict[str, dict[str, float]], name: str, phase: str) -> float:
    return one[OURS][f"{phase}_p50_us"] / one[name][f"{phase}_p50_us"]


if __name__ == "__main__":
    main()
