"""The mesh tax: what four processes, NATS and HTTP add to the same worker loop in process.

    python -m ops.bench.bench_mesh_tax [--model DIR] [--requests 60] [--out PATH]

The same prompts, one request at a time, in turns: once through HTTP, gateway, prefill, ticket
and decode, once by direct calls. The tax a request is the difference of the times to the first
token; the tax a token is that of the times a token, each taken over a whole answer: tokens
that come fast travel together, so that the time between two of them says nothing. How far
apart they arrive is reported beside it. CPU time is that of all processes of the mesh but the
client. Every prompt is new, so that nothing is cached.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import urllib.request
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path

import psutil
from ops.bench.hardware import describe
from ops.bench.run import Run
from tests.integration.mesh import Mesh

from pagemesh.kernels.native.library import bound_spinning
from pagemesh.runtime.model_folder import find_model

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 32
WARM_UP = 5


def through_the_mesh(client: HTTPConnection, model: str, prompt: list[int]) -> Run:
    """One streamed completion; the time of each chunk that brought tokens. The client is the
    plainest there is, since what it costs is counted as the mesh's."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0,
        "stream": True, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    run, started_s = Run(), time.perf_counter()
    headers = {"content-type": "application/json"}
    client.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
    response = client.getresponse()
    if response.status != HTTPStatus.OK:
        raise RuntimeError(f"{response.status}: {response.read().decode()}")
    while line := response.readline():
        if line.startswith(b"data: {"):
            at_s = time.perf_counter() - started_s
            for choice in json.loads(line[6:])["choices"]:
                run.times_s += [at_s] * len(choice.get("token_ids") or [])
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
    bound_spinning()
    from ops.bench.in_process import InProcess  # loads torch, which reads the bound once

    draw = random.Random(1)
    columns: dict[str, list[float]] = {
        name: []
        for name in ("mesh_ttft", "own_ttft", "mesh_token", "own_token", "mesh_wait",
                     "handover", "mesh_cpu", "own_cpu")
    }  # fmt: skip
    with (
        Mesh(folder / "mesh", model=model, pool_bytes=256 << 20) as mesh,
        closing(HTTPConnection(mesh.url.removeprefix("http://"), timeout=60.0)) as client,
        InProcess(model, folder) as own,
    ):
        with urllib.request.urlopen(f"{mesh.url}/v1/models", timeout=60.0) as answer:
            name = json.load(answer)["data"][0]["id"]
        pids = [*mesh.pids().values()]
        for index in range(WARM_UP + request_count):
            prompt = [draw.randrange(200) for _ in range(PROMPT_TOKENS)]
            mesh_cpu_s = cpu_seconds(pids)
            there = through_the_mesh(client, name, prompt)
            mesh_cpu_s = cpu_seconds(pids) - mesh_cpu_s
            own_cpu_s = time.process_time()
            here = own.generate(prompt, OUTPUT_TOKENS)
            own_cpu_s = time.process_time() - own_cpu_s
            if index < WARM_UP:
                continue
            columns["mesh_ttft"].append(1e3 * there.times_s[0])
            columns["own_ttft"].append(1e3 * here.times_s[0])
            columns["mesh_token"].append(a_token(there))
            columns["own_token"].append(a_token(here))
            columns["mesh_wait"] += waits(there)
            columns["handover"].append(1e3 * (there.times_s[1] - there.times_s[0]))
            columns["mesh_cpu"].append(1e6 * mesh_cpu_s)
            columns["own_cpu"].append(1e6 * own_cpu_s)
    return report(columns, request_count)


def report(columns: dict[str, list[float]], request_count: int) -> dict[str, object]:
    """Per cent points of both ways, and their differences: the tax."""
    ttft = {way: percentiles(columns[f"{way}_ttft"]) for way in ("mesh", "own")}
    token = {way: percentiles(columns[f"{way}_token"]) for way in ("mesh", "own")}
    cpu = {way: statistics.fmean(columns[f"{way}_cpu"]) for way in ("mesh", "own")}
    return {
        "requests": request_count,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "first_token_ms": ttft,
        "a_token_ms": token,
        "between_arrivals_ms": percentiles(columns["mesh_wait"]),
        "first_to_second_token_ms": percentiles(columns["handover"]),
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
