"""How many prompts a second does a pager admit through NATS?

    python -m ops.bench.bench_pager_bus [--seconds 5] [--out ops/bench/results/pager_bus.json]

The pager is started by ``pagemesh serve pager``, on a nats-server of the benchmark's own. Eight
workers, each with a connection of its own, admit and release with several sequences in flight each;
they share one process, so that on two cores the pager has one, and they and the server have the
other. Three quarters of every prompt are cached; its release commits the rest. The pool is full, so
that admissions evict. ``admits/s`` counts pairs of admit and release.

The floor is an echo of messages of the same size by a process like the pager, on the same bus in
the same run: one at a time, and as many in flight. CPU time is reported for each process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from ops.bench.aims import of_aim
from ops.bench.bench_bus import latency, one_by_one
from ops.bench.hardware import describe
from ops.bench.pager_load import HOST, SPEC, Load, Seen, drive

from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.rpc import call
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import subjects
from pagemesh.wire.errors import Absent, DeadlineExceeded
from pagemesh.wire.pager_reports import PagesSnapshot, SnapshotWanted

LOADS = (Load(1_024), Load(8_192))
POOL_PAGES = 32_768
AIM_PER_SECOND = 3_000
START_TIMEOUT_S = 20.0
ECHO, ANSWER, ENVELOPE_BYTES = "bench.echo", b"x" * 300, 400


@contextlib.contextmanager
def pager(url: str, folder: Path) -> Iterator[int]:
    """A pager process, once it answers; yields its pid."""
    environ = {
        key: text
        for key, text in os.environ.items()
        if not key.startswith("PAGEMESH_") or key == "PAGEMESH_COMPILED"
    }
    environ |= {
        "PAGEMESH_NATS": url,
        "PAGEMESH_HOST": HOST,
        "PAGEMESH_NAME": "pager",
        "PAGEMESH_POOL_DIR": str(folder),
        "PAGEMESH_POOL_BYTES": str(POOL_PAGES * SPEC.page_bytes),
        "PAGEMESH_SECRET": "a-secret-of-the-benchmark-alone-42",
        "PAGEMESH_SESSION_TTL_MS": "60000",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "pagemesh.cli", "serve", "pager"], env=environ
    )
    try:
        uvloop.run(answered(url, "operator", _ask_pager))
        yield process.pid
    finally:
        process.terminate()
        process.wait()


async def answered(url: str, role: str, ask: Callable[[Bus], Awaitable[object]]) -> None:
    """Return once ``ask`` gets an answer."""
    async with (
        asyncio.timeout(START_TIMEOUT_S),
        Bus.connect(BusConfig(url=url), role=role, name="bench") as bus,
    ):
        while True:
            with contextlib.suppress(Absent, DeadlineExceeded):
                await ask(bus)
                return
            await asyncio.sleep(0.05)


def _ask_pager(bus: Bus) -> Awaitable[object]:
    return call(bus, subjects.pager(HOST), SnapshotWanted(), PagesSnapshot, timeout_ms=500)


def _ask_echo(bus: Bus) -> Awaitable[object]:
    return bus.request(ECHO, b"", timeout_ms=500)


async def _echo(url: str) -> None:
    def admit(delivery: Delivery) -> None:
        delivery.respond(ANSWER)

    async with Bus.connect(BusConfig(url=url), role="pager", name="echo") as bus:
        await bus.subscribe(ECHO, admit)
        await asyncio.Event().wait()


def echo(url: str) -> None:
    uvloop.run(_echo(url))


async def _floor(url: str, load: Load) -> dict[str, float]:
    data = bytes(4 * load.prompt_tokens + ENVELOPE_BYTES)
    async with Bus.connect(BusConfig(url=url), role="client", name="bench") as bus:

        async def ask() -> None:
            await bus.request(ECHO, data, timeout_ms=10_000)

        await one_by_one(ask, 100)
        alone = await latency(ask)
        started_s = time.perf_counter()
        count = load.worker_count * load.in_flight
        await asyncio.gather(*(one_by_one(ask, 50) for _ in range(count)))
        per_second = 50 * count / (time.perf_counter() - started_s)
    return {"round_trip_p50_ms": alone["p50_ms"], "echoes_per_second": per_second}


def floor(url: str) -> dict[int, dict[str, float]]:
    """What the bus alone takes, by prompt tokens."""
    process = multiprocessing.get_context("spawn").Process(target=echo, args=(url,))
    process.start()
    try:
        uvloop.run(answered(url, "client", _ask_echo))
        return {load.prompt_tokens: uvloop.run(_floor(url, load)) for load in LOADS}
    finally:
        process.terminate()
        process.join()


def drive_here(
    url: str, folder: Path, load: Load, seconds: float, pids: dict[str, int], out: Connection
) -> None:
    """Run the workers; called in a process of their own."""
    out.send(uvloop.run(drive(url, folder, load, seconds, pids | {"workers": os.getpid()})))


def measure(url: str, folder: Path, load: Load, seconds: float, pids: dict[str, int]) -> Seen:
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=drive_here, args=(url, folder, load, seconds, pids, there)
    )
    process.start()
    there.close()
    seen: Seen = here.recv()
    process.join()
    return seen


def report(load: Load, seen: Seen) -> dict[str, Any]:
    times = sorted(seen.admit_ms)
    return {
        **asdict(load),
        "admits_per_second": seen.per_second,
        "cached_share": seen.cached_tokens / (seen.admitted * load.prompt_tokens),
        "admit_ms": {"p50": statistics.median(times), "p99": times[int(0.99 * len(times))]},
        "cpu_us_an_admit_and_release": {
            name: 1e6 * used_s / seen.admitted for name, used_s in seen.cpu_s.items()
        },
        "cores_used": {name: used_s / seen.seconds for name, used_s in seen.cpu_s.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each length and turn")
    parser.add_argument("--turns", type=int, default=3, help="the median one is reported")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = describe()
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as name, NatsServer(Path(name)) as server:
        folder = Path(name)
        floors = floor(server.url)
        with pager(server.url, folder) as pid:
            pids = {"pager": pid, "nats-server": server.pid}
            turns: dict[Load, list[Seen]] = {load: [] for load in LOADS}
            for _ in range(options.turns):
                for load in LOADS:
                    turns[load].append(measure(server.url, folder, load, options.seconds, pids))
    results = []
    for load, turn in turns.items():
        turn.sort(key=lambda seen: seen.per_second)
        middle = report(load, turn[len(turn) // 2])
        results.append(middle | {"floor": floors[load.prompt_tokens]})
    print(json.dumps(results, indent=1))
    for found in results:
        rate, echoes = found["admits_per_second"], found["floor"]["echoes_per_second"]
        print(
            f"{found['prompt_tokens']} tokens: {rate:,.0f} admits/s, "
            f"{rate / echoes:.2f} of echoes, {of_aim(rate, AIM_PER_SECOND, at_least=True)}"
        )
    if options.out is not None:
        report_all = {"on": machine, "aim_per_second": AIM_PER_SECOND, "results": results}
        options.out.write_text(json.dumps(report_all, indent=1) + "\n")


if __name__ == "__main__":
    main()
