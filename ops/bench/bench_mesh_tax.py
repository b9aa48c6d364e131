"""The mesh tax: what four processes, NATS and HTTP add to the same worker loop in process.

    python -m ops.bench.bench_mesh_tax [--model DIR] [--requests 60] [--out PATH]

The same prompts, one request at a time: through HTTP, gateway, prefill or decode, and by direct
calls, ten of these and ten of those in turns, after two that are not counted, since whoever
comes second finds the other's data in the processor's caches. The tax a request is the
difference of the times to the first token; the tax a token is that of the times a token, each
taken over a whole answer: tokens that come fast travel together, so that the time between two
of them says nothing. How far apart they arrive is reported beside it. CPU time is that of all
processes of the mesh but the client. Every prompt is new, so that nothing is cached.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
from ops.bench.hardware import describe
from ops.bench.run import Run
from tests.integration.mesh import Mesh

from pagemesh.runtime.model_folder import find_model

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 32
TURN = 10
WARM_UP = 2
_LAST_CHUNK = b"0\r\n\r\n"


class Client:
    """One connection and as little else as can be: what the client costs is counted as the
    mesh's. An answer is timed by when its bytes came, and read afterwards."""

    def __init__(self, url: str, model: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host, self._model = host, model

    def complete(self, prompt: list[int]) -> Run:
        """One streamed completion; the time of each piece that brought tokens."""
        body = json.dumps({
            "model": self._model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS,
            "temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True,
        })  # fmt: skip
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        data = (head + body).encode()
        pieces: list[tuple[float, bytes]] = []
        started_s = time.perf_counter()
        self._socket.sendall(data)
        while not pieces or not pieces[-1][1].endswith(_LAST_CHUNK):
            piece = self._socket.recv(1 << 16)
            pieces.append((time.perf_counter() - started_s, piece))
            if not piece or (len(pieces) == 1 and not piece.startswith(b"HTTP/1.1 200")):
                raise RuntimeError(piece.decode())
        return _tokens_of(pieces)

    def close(self) -> None:
        self._socket.close()


def _tokens_of(pieces: list[tuple[float, bytes]]) -> Run:
    run = Run()
    for at_s, piece in pieces:
        for line in piece.split(b"\n"):
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    run.times_s += [at_s] * len(choice.get("token_ids") or [])
    if len(run.times_s) != OUTPUT_TOKENS:
        raise RuntimeError(f"{len(run.times_s)} tokens; an event came in two pieces, or none")
    return run


def cpu_seconds(pids: list[int]) -> float:
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))],
    }


def a_token(run: Run) -> float:
    """Milliseconds a token, after the second: the way to that one holds the handover."""
    return 1e3 * (run.times_s[-1] - run.times_s[1]) / (len(run.times_s) - 2)


def waits(run: Run) -> list[float]:
    """Milliseconds between arrivals, each of one or several tokens, after the second token."""
    arrivals = sorted(set(run.times_s[1:]))
    return [1e3 * (later - earlier) for earlier, later in pairwise(arrivals)]


def measure(model: Path, folder: Path, request_count: int) -> dict[str, object]:
    import ops.bench.as_workers  # noqa: F401  (before torch, which the next one loads)
    from ops.bench.in_process import InProcess

    draw = random.Random(1)
    ways = {"mesh": Way(), "own": Way()}
    with (
        Mesh(folder / "mesh", model=model, pool_bytes=256 << 20) as mesh,
        InProcess(model, folder) as own,
        ExitStack() as stack,
    ):
        name = httpx.get(f"{mesh.url}/v1/models").json()["data"][0]["id"]
        client = stack.enter_context(closing(Client(mesh.url, name)))
        pids = [*mesh.pids().values()]
        for first in range(0, request_count, TURN):
            count = min(TURN, request_count - first)
            prompts = [
                [draw.randrange(200) for _ in range(PROMPT_TOKENS)] for _ in range(WARM_UP + count)
            ]
            ways["mesh"].take_turn(client.complete, prompts, lambda: cpu_seconds(pids))
            ways["own"].take_turn(
                lambda prompt: own.generate(prompt, OUTPUT_TOKENS), prompts, time.process_time
            )
    return report(ways, request_count)


@dataclass(slots=True)
class Way:
    """What was measured of one way to answer."""

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


def report(ways: dict[str, Way], request_count: int) -> dict[str, object]:
    """Per cent points of both ways, and their differences: the tax."""
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
    figures["on"] = describe()
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    shown = ("tax", "first_token_ms", "a_token_ms", "between_arrivals_ms")
    print(json.dumps({name: figures[name] for name in shown}, indent=2))
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
