"""The mesh tax: what four processes, NATS and HTTP add to the worker loop in one process.

    python -m ops.bench.bench_mesh_tax [--model DIR] [--requests 60] [--out PATH]

The same prompts are answered one at a time through the whole mesh (HTTP, gateway, prefill or
decode) and by direct calls, in alternating turns of ten. The first two requests of a turn are not
counted, since the other side has left its own data in the processor's caches. The tax per request
is the difference of the times to first token. The tax per token is the difference of the mean times
per token of whole answers: fast tokens travel together, so the time between two of them says
nothing; how far apart they arrive is reported as well. CPU time is that of all processes of the
mesh, without the client. Every prompt is new, so nothing is cached.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ops.bench.aims import of_aim
from ops.bench.cpu import cpu_s
from ops.bench.hardware import describe
from ops.bench.no_drafts import NO_DRAFTS
from ops.bench.run import Run
from ops.bench.stream import Connection
from tests.integration.mesh import Mesh

from pagemesh.cli.benching.timed_stream import events_of
from pagemesh.runtime.model_folder import find_model

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 32
TURN = 10
WARM_UP = 2
AIMS_MS = {"first_token_ms": 2.0, "token_ms": 0.1}
"""Aims for the median tax."""


def complete(connection: Connection, prompt: list[int]) -> Run:
    """One streamed completion, with the arrival time of each token."""
    run = Run()
    body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS}
    for at_s, event in events_of(connection.ask("/v1/completions", body)):
        for choice in event["choices"]:
            run.times_s += [at_s] * len(choice.get("token_ids") or [])
    if len(run.times_s) != OUTPUT_TOKENS:
        raise RuntimeError(f"{len(run.times_s)} tokens instead of {OUTPUT_TOKENS}")
    return run


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))],
    }


def a_token(run: Run) -> float:
    """Milliseconds per token, from the first to the last: tokens may share a message, so single
    gaps say nothing."""
    return 1e3 * (run.times_s[-1] - run.times_s[0]) / (len(run.times_s) - 1)


def waits(run: Run) -> list[float]:
    """Milliseconds between arrivals, each of one or several tokens, after the second token."""
    arrivals = sorted(set(run.times_s[1:]))
    return [1e3 * (later - earlier) for earlier, later in pairwise(arrivals)]


def measure(model: Path, folder: Path, request_count: int) -> dict[str, Any]:
    import ops.bench.as_workers  # noqa: F401  (before torch, which the next one loads)
    from ops.bench.in_process import InProcess

    draw = random.Random(1)
    ways = {"mesh": Way(), "own": Way()}
    with (
        Mesh(folder / "mesh", model=model, pool_bytes=256 << 20, env=NO_DRAFTS) as mesh,
        InProcess(model, folder) as own,
        ExitStack() as stack,
    ):
        connection = stack.enter_context(closing(Connection(mesh.url)))
        pids = mesh.pids()
        for first in range(0, request_count, TURN):
            count = min(TURN, request_count - first)
            prompts = [
                [draw.randrange(200) for _ in range(PROMPT_TOKENS)] for _ in range(WARM_UP + count)
            ]
            ways["mesh"].take_turn(
                lambda prompt: complete(connection, prompt),
                prompts,
                lambda: sum(cpu_s(pids).values()),
            )
            ways["own"].take_turn(
                lambda prompt: own.generate(prompt, OUTPUT_TOKENS), prompts, time.process_time
            )
    return report(ways, request_count)


@dataclass(slots=True)
class Way:
    """The measurements of one way to answer: the mesh, or direct calls."""

    runs: list[Run] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    def take_turn(
        self,
        complete: Callable[[list[int]], Run],
        prompts: list[list[int]],
        cpu_s: Callable[[], float],
    ) -> None:
        """Answer ``prompts``; the first ``WARM_UP`` are not counted."""
        for prompt in prompts[:WARM_UP]:
            complete(prompt)
        before_s = cpu_s()
        runs = [complete(prompt) for prompt in prompts[WARM_UP:]]
        self.cpu_us.append(1e6 * (cpu_s() - before_s) / len(runs))
        self.runs += runs


def report(ways: dict[str, Way], request_count: int) -> dict[str, Any]:
    """The percentiles of both ways, and their differences: the tax."""
    ttft, token, cpu = {}, {}, {}
    for name, way in ways.items():
        ttft[name] = percentiles([1e3 * run.times_s[0] for run in way.runs])
        token[name] = percentiles([a_token(run) for run in way.runs])
        cpu[name] = statistics.fmean(way.cpu_us)
    mesh = ways["mesh"].runs
    return {
        "requests": request_count,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "first_token_ms": ttft,
        "a_token_ms": token,
        "between_arrivals_ms": percentiles([wait for run in mesh for wait in waits(run)]),
        "first_to_second_token_ms": percentiles(
            [1e3 * (run.times_s[1] - run.times_s[0]) for run in mesh]
        ),
        "cpu_us_a_request": cpu,
        "tax": {
            "first_token_ms": {at: ttft["mesh"][at] - ttft["own"][at] for at in ("p50", "p99")},
            "token_ms": {at: token["mesh"][at] - token["own"][at] for at in ("p50", "p99")},
            "cpu_us_a_request": cpu["mesh"] - cpu["own"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="default: the demo model")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/mesh_tax.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "mesh").mkdir()
        figures = measure(find_model(arguments.model).path, Path(folder), arguments.requests)
    figures["aims"] = AIMS_MS
    figures["on"] = describe()
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    shown = ("tax", "first_token_ms", "a_token_ms", "between_arrivals_ms")
    print(json.dumps({name: figures[name] for name in shown}, indent=2))
    for name, aim_ms in AIMS_MS.items():
        tax_ms = figures["tax"][name]["p50"]
        print(f"tax, {name}: {tax_ms:.2f} at p50, {of_aim(tax_ms, aim_ms)}")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
