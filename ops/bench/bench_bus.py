"""What does the bus cost, and why do pages not travel on it? The measurements of ADR 0004.

    python -m ops.bench.bench_bus [--seconds 12] [--out ops/bench/results/bus.json]

Client and service are separate processes, as in the mesh, on a nats-server that the benchmark
starts. Variants take turns, so that a busy machine slows all alike; medians over turns are
reported. The floor is an echo over a TCP connection on the same event loop, and the ratio to plain
nats-py is the cost of our own checks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import nats
import uvloop
from ops.bench.hardware import describe

from pagemesh.runtime import rpc, trace
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.ports import free_port
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import codec
from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import Heartbeat

BODY = b"x" * 256
PAGES_BYTES = 4 << 20
IN_FLIGHT = 128
TURNS_MIN = 3
ASK_COUNT = 400
_PONG = codec.encode(Ok())
_HEARTBEAT = Heartbeat(worker="w", incarnation=1, epoch=1, lease_count=3, lease_digest=7)

Turn = Callable[[], Awaitable[dict[str, float]]]


async def _serve(url: str, tcp_port: int) -> None:
    """The answering process: echoes on bus subjects and on a TCP port."""

    def answer(data: Callable[[Delivery], bytes]) -> Callable[[Delivery], None]:
        def admit(delivery: Delivery) -> None:
            delivery.respond(data(delivery))

        return admit

    def typed(delivery: Delivery) -> bytes:
        trace.accept(delivery.headers)
        codec.decode_as(delivery.data, Heartbeat)
        return _PONG

    received = 0

    def count(_: Delivery) -> None:
        nonlocal received
        received += 1

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                writer.write(await reader.readexactly(len(BODY)))
        writer.close()

    server = await asyncio.start_server(pipe, "127.0.0.1", tcp_port)
    async with server, Bus.connect(BusConfig(url=url), role="pager", name="bench") as bus:
        await bus.subscribe("bench.echo", answer(lambda delivery: delivery.data))
        await bus.subscribe("bench.typed", answer(typed))
        await bus.subscribe("bench.sink", count)
        await bus.subscribe("bench.count", answer(lambda _: b"%d" % received))
        await asyncio.Event().wait()


def serve(url: str, tcp_port: int) -> None:
    uvloop.run(_serve(url, tcp_port))


async def one_by_one(ask: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Milliseconds of each of ``count`` calls."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        await ask()
        times.append((time.perf_counter() - started) * 1e3)
    return times


async def latency(ask: Callable[[], Awaitable[object]], count: int = ASK_COUNT) -> dict[str, float]:
    times = sorted(await one_by_one(ask, count))
    return {"p50_ms": times[len(times) // 2], "p99_ms": times[int(len(times) * 0.99)]}


async def throughput(ask: Callable[[], Awaitable[object]]) -> dict[str, float]:
    started = time.perf_counter()
    await asyncio.gather(*(one_by_one(ask, 20) for _ in range(IN_FLIGHT)))
    return {"per_second": IN_FLIGHT * 20 / (time.perf_counter() - started)}


async def publish_rate(bus: Bus, headers: dict[str, str] | None) -> dict[str, float]:
    async def received() -> int:
        return int((await bus.request("bench.count", b"", timeout_ms=10_000)).data)

    count, before = 20_000, await received()
    started = time.perf_counter()
    for number in range(count):
        bus.publish("bench.sink", BODY, headers=headers)
        if number % 500 == 499:
            await asyncio.sleep(0)
    while await received() < before + count:
        pass
    return {"per_second": count / (time.perf_counter() - started)}


@contextlib.asynccontextmanager
async def turns(url: str, tcp_port: int) -> AsyncIterator[dict[str, Turn]]:
    """Every variant, by name."""
    reader, writer = await asyncio.open_connection("127.0.0.1", tcp_port)
    bare = await nats.connect(url)
    source = memoryview(bytearray(PAGES_BYTES))
    target = bytearray(PAGES_BYTES)
    pages = bytes(PAGES_BYTES)

    async def tcp() -> None:
        writer.write(BODY)
        await reader.readexactly(len(BODY))

    async def copy() -> None:
        target[:] = source

    async with Bus.connect(BusConfig(url=url), role="client", name="bench") as bus:
        headers = {trace.TRACEPARENT: trace.new_trace().traceparent}

        async def echo(data: bytes = BODY, with_headers: bool = True) -> None:
            await bus.request(
                "bench.echo", data, timeout_ms=10_000, headers=headers if with_headers else None
            )

        async def typed() -> None:
            with trace.use(trace.new_trace()):
                await rpc.call(bus, "bench.typed", _HEARTBEAT, Ok, timeout_ms=10_000)

        yield {
            "tcp echo, 256 B": lambda: latency(tcp),
            "nats-py request, 256 B": lambda: latency(
                lambda: bare.request("bench.echo", BODY, timeout=10)
            ),
            "bus request, 256 B": lambda: latency(lambda: echo(with_headers=False)),
            "bus request, 256 B, traceparent": lambda: latency(echo),
            "typed call with trace": lambda: latency(typed),
            f"bus requests, {IN_FLIGHT} in flight": lambda: throughput(echo),
            "publish to subscriber, 256 B": lambda: publish_rate(bus, None),
            "publish to subscriber, 256 B, traceparent": lambda: publish_rate(bus, headers),
            "4 MiB of pages over the bus and back": lambda: latency(lambda: echo(pages), 10),
            "4 MiB of pages copied in memory": lambda: latency(copy, 50),
        }
    await bare.close()
    writer.close()


async def measure(url: str, tcp_port: int, seconds: float) -> dict[str, dict[str, float]]:
    rounds: dict[str, list[dict[str, float]]] = {}
    async with turns(url, tcp_port) as variants:
        for turn in variants.values():
            await turn()
        started = time.perf_counter()
        while time.perf_counter() - started < seconds or len(rounds[next(iter(rounds))]) < (
            TURNS_MIN
        ):
            for name, turn in variants.items():
                rounds.setdefault(name, []).append(await turn())
    return {
        name: {key: statistics.median(found[key] for found in results) for key in results[0]}
        for name, results in rounds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine = describe()
    tcp_port = free_port()
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:
        service = multiprocessing.get_context("spawn").Process(
            target=serve, args=(server.url, tcp_port)
        )
        service.start()
        try:
            time.sleep(1.5)
            results = uvloop.run(measure(server.url, tcp_port, options.seconds))
        finally:
            service.terminate()
            service.join()
    for name, values in results.items():
        shown = "  ".join(f"{key} {value:,.3f}" for key, value in values.items())
        print(f"{name:45} {shown}")
    bare, ours = results["nats-py request, 256 B"], results["bus request, 256 B"]
    ratio = ours["p50_ms"] / bare["p50_ms"]
    print(f"bus / bare nats-py, p50: {ratio:.2f}")
    if options.out is not None:
        report = {"machine": machine, "bus_over_nats_py": ratio, "results": results}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
