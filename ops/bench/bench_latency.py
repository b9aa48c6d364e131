"""Time between tokens while long prompts arrive: how much streams suffer from other requests.

    python -m ops.bench.bench_latency [--models S M] [--setups both handover decode]
        [--out PATH]

A few clients stream one answer after the other, first by themselves (idle), then while long
prompts arrive, of which one is always in flight, and short ones beside them (load). Each setup is a
mesh of its own: ``both`` has a prefill and a decode worker on the same cores; in ``handover``, also
with both, prefill computes every long prompt; ``decode`` has one worker that does everything. The
aim is that the 99th percentile of the time between tokens under load is at most twice the idle one
plus one chunk, the time that the prefill of a full step takes when nothing else runs. Models have
random weights and usual shapes; prompts are new, so nothing is cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop
from ops.bench.aims import of_aim
from ops.bench.hardware import describe
from ops.bench.no_drafts import NO_DRAFTS
from ops.bench.serving.random_model import save
from tests.integration.mesh import Mesh

from pagemesh.cli.benching.client import Reply, Server, complete, find_server

WORDS = range(1_000, 9_000)
"""Token ids in the vocabulary of every model."""
STREAM_COUNT, STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS = 4, 48, 96
LONG_TOKENS, LONG_OUTPUT_TOKENS = 2_048, 8
SHORT_TOKENS, SHORT_OUTPUT_TOKENS, SHORT_PERIOD_S = 40, 8, 0.5
CHUNK_TOKENS = 512
"""Tokens of a full step: the default of PAGEMESH_STEP_TOKENS_MAX."""
WARM_UP_S = 2.0
AIM_RATIO = 2.0
SETUPS = {"both": (1, 1, False), "handover": (1, 1, True), "decode": (0, 1, False)}
"""Prefill workers, decode workers, and whether prefill computes every long prompt."""
_POOL_BYTES = 1 << 30


@dataclass(slots=True)
class Seen:
    """The replies, by kind of request."""

    streams: list[Reply] = field(default_factory=list)
    longs: list[Reply] = field(default_factory=list)
    shorts: list[Reply] = field(default_factory=list)


@dataclass(slots=True)
class Load:
    """Sends requests to ``server`` until ``until_s``, a time of the performance counter."""

    server: Server
    until_s: float
    random: random.Random
    seen: Seen = field(default_factory=Seen)

    async def stream(self) -> None:
        while time.perf_counter() < self.until_s:
            reply = await self.ask(STREAM_PROMPT_TOKENS, STREAM_OUTPUT_TOKENS)
            self.seen.streams.append(reply)

    async def long_prompts(self) -> None:
        while time.perf_counter() < self.until_s:
            self.seen.longs.append(await self.ask(LONG_TOKENS, LONG_OUTPUT_TOKENS))

    async def short_prompts(self) -> None:
        while time.perf_counter() < self.until_s:
            self.seen.shorts.append(await self.ask(SHORT_TOKENS, SHORT_OUTPUT_TOKENS))
            await asyncio.sleep(SHORT_PERIOD_S)

    async def ask(self, prompt_tokens: int, output_tokens: int) -> Reply:
        """A completion of a new prompt. Raises ``RequestFailedError``."""
        prompt = [self.random.choice(WORDS) for _ in range(prompt_tokens)]
        return await complete(self.server, prompt, output_tokens)


async def measure(server: Server, idle_s: float, load_s: float) -> dict[str, Any]:
    """The figures as clients see them, in milliseconds."""
    dice = random.Random(1)
    alone = Load(server, time.perf_counter(), dice)
    for _ in range(2):
        alone.seen.longs.append(await alone.ask(LONG_TOKENS, LONG_OUTPUT_TOKENS))
    idle = await run_load(Load(server, time.perf_counter() + idle_s, dice), loaded=False)
    load = await run_load(Load(server, time.perf_counter() + load_s, dice), loaded=True)
    chunk_ms = min(first_texts_ms(alone.seen.longs), default=0.0) * CHUNK_TOKENS / LONG_TOKENS
    return report(idle, load, chunk_ms)


async def run_load(load: Load, *, loaded: bool) -> Seen:
    """Run the streams, and if ``loaded`` the other requests. Replies that ended during the warm-up
    are dropped."""
    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(STREAM_COUNT):
            group.create_task(load.stream())
        if loaded:
            group.create_task(load.long_prompts())
            group.create_task(load.short_prompts())
    warm_s = started_s + WARM_UP_S
    kept = [one for one in load.seen.streams if one.ended_s > warm_s]
    return Seen(kept, load.seen.longs, load.seen.shorts)


def gaps_ms(replies: list[Reply]) -> list[float]:
    """Times between chunks with text. The first of each reply includes the handover to decode, if
    there was one."""
    return [
        1e3 * (later - earlier)
        for reply in replies
        for earlier, later in pairwise(reply.arrivals_s)
    ]


def first_texts_ms(replies: list[Reply]) -> list[float]:
    """Times to the first text. Replies whose few random tokens form no whole character are left
    out."""
    return [1e3 * (reply.arrivals_s[0] - reply.sent_s) for reply in replies if reply.arrivals_s]


def percentiles(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile; zeros if there are no values."""
    ordered = sorted(values) or [0.0]
    return {
        "p50": round(ordered[len(ordered) // 2], 2),
        "p99": round(ordered[round(0.99 * (len(ordered) - 1))], 2),
        "count": len(values),
    }


def report(idle: Seen, load: Seen, chunk_ms: float) -> dict[str, Any]:
    """Figures of one model in one setup; times in milliseconds."""
    quiet, busy = percentiles(gaps_ms(idle.streams)), percentiles(gaps_ms(load.streams))
    aim_ms = AIM_RATIO * quiet["p99"] + chunk_ms
    chunks = sum(len(one.arrivals_s) for one in idle.streams)
    return {
        "idle_itl": quiet,
        "load_itl": busy,
        "ratio_p50": round(busy["p50"] / max(quiet["p50"], 1e-9), 2),
        "ratio_p99": round(busy["p99"] / max(quiet["p99"], 1e-9), 2),
        "chunk": round(chunk_ms, 2),
        "aim_p99": round(aim_ms, 2),
        "kept": busy["p99"] <= aim_ms,
        "idle_tokens_a_chunk": round(sum(one.output_tokens for one in idle.streams) / chunks, 2),
        "stream_first": {
            "idle": percentiles(first_texts_ms(idle.streams)),
            "load": percentiles(first_texts_ms(load.streams)),
        },
        "long_first": percentiles(first_texts_ms(load.longs)),
        "short_first": percentiles(first_texts_ms(load.shorts)),
    }


def bench(model: str, setup: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    prefill, decode, handover = SETUPS[setup]
    (folder / setup).mkdir(parents=True)
    with (
        Mesh(
            folder / setup,
            model=folder,
            env=NO_DRAFTS,
            prefill=prefill,
            decode=decode,
            pool_bytes=_POOL_BYTES,
            handover=handover,
        ) as mesh,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        server = find_server("pagemesh", mesh.url)
        figures = runner.run(measure(server, options.idle_s, options.load_s))
    return {"model": model, "setup": setup, **figures, "on": describe()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["S"], choices=["S", "M", "L"])
    parser.add_argument("--setups", nargs="+", default=list(SETUPS), choices=SETUPS)
    parser.add_argument("--idle-s", type=float, default=8.0)
    parser.add_argument("--load-s", type=float, default=16.0)
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/latency.json"))
    options = parser.parse_args()
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for model in options.models:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            save(model, Path(name))
            for setup in options.setups:
                row = bench(model, setup, Path(name), options)
                print(json.dumps(row, indent=1))
                print(
                    f"p99 under load: {of_aim(row['load_itl']['p99'], row['aim_p99'])}", flush=True
                )
                rows = [one for one in rows if (one["model"], one["setup"]) != (model, setup)]
                rows.append(row)
    rows.sort(key=lambda row: (row["model"], row["setup"]))
    options.out.write_text(json.dumps({"benchmark": "latency", "rows": rows}, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
