"""The CPU time that the mesh uses beside the model: while idle, and per streamed token.

    python -m ops.bench.bench_overhead [--model DIR] [--rounds 5] [--out PATH]

Idle: milliseconds of CPU time a second of each process of ``pagemesh up``, itself included, over
ten seconds, after four to settle. Streaming: one worker gives eight answers of 128 tokens to
prompts of 512 at once; each process's CPU time is divided by the number of tokens, and the first
round is not counted. The pager's idle time is subtracted from its own. Medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from ops.bench.aims import of_aim
from ops.bench.cpu import cpu_s
from ops.bench.hardware import describe
from ops.bench.no_drafts import NO_DRAFTS
from ops.bench.stream import Connection
from tests.integration.mesh import Mesh

from pagemesh.runtime.model_folder import find_model

STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 512, 128
SETTLE_S, IDLE_S = 4.0, 10.0
AIMS = {"idle_ms_a_second": 20.0, "gateway_ms_a_token": 0.10, "pager_ms_a_token": 0.05}


def idle(pids: Mapping[str, int]) -> dict[str, float]:
    """Milliseconds of CPU time a second, by process."""
    time.sleep(SETTLE_S)
    before_s = cpu_s(pids)
    time.sleep(IDLE_S)
    after_s = cpu_s(pids)
    return {name: 1e3 * (after_s[name] - before_s[name]) / IDLE_S for name in pids}


def stream(
    connections: list[Connection], pids: Mapping[str, int], draw: random.Random
) -> tuple[dict[str, float], float]:
    """One round: milliseconds of CPU time per token, by process, and the tokens a second."""
    prompts = [[draw.randrange(200) for _ in range(PROMPT_TOKENS)] for _ in connections]
    before_s, started_s = cpu_s(pids), time.perf_counter()
    with ThreadPoolExecutor(len(connections)) as pool:
        asked = [
            pool.submit(
                connection.ask, "/v1/completions", {"prompt": prompt, "max_tokens": OUTPUT_TOKENS}
            )
            for connection, prompt in zip(connections, prompts, strict=True)
        ]
        for answer in asked:
            answer.result()
    took_s, after_s = time.perf_counter() - started_s, cpu_s(pids)
    tokens = len(connections) * OUTPUT_TOKENS
    return {name: 1e3 * (after_s[name] - before_s[name]) / tokens for name in pids}, tokens / took_s


def measure(model: Path, folder: Path, round_count: int) -> dict[str, Any]:
    draw = random.Random(1)
    rounds: list[dict[str, float]] = []
    speeds: list[float] = []
    with Mesh(folder / "idle", model=model, pool_bytes=256 << 20, env=NO_DRAFTS) as mesh:
        idle_ms = idle(mesh.pids() | {"up": mesh.up_pid})
    with (
        Mesh(folder / "busy", model=model, prefill=0, pool_bytes=256 << 20, env=NO_DRAFTS) as mesh,
        ExitStack() as stack,
    ):
        pids = mesh.pids()
        connections = [stack.enter_context(closing(Connection(mesh.url))) for _ in range(STREAMS)]
        for number in range(1 + round_count):
            token_ms, speed = stream(connections, pids, draw)
            if number:
                rounds.append(token_ms)
                speeds.append(speed)
    token_ms = {name: statistics.median(one[name] for one in rounds) for name in pids}
    speed = statistics.median(speeds)
    return {
        "streams": STREAMS,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "rounds": round_count,
        "tokens_a_second": speed,
        "idle_ms_a_second_by_process": idle_ms,
        "ms_a_token_by_process": token_ms,
        "idle_ms_a_second": sum(idle_ms.values()),
        "gateway_ms_a_token": token_ms["gateway"],
        "pager_ms_a_token": token_ms["pager"] - idle_ms["pager"] / speed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="default: the demo model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/overhead.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name in ("idle", "busy"):
            (Path(folder) / name).mkdir()
        figures = measure(find_model(arguments.model).path, Path(folder), arguments.rounds)
    figures["aims"] = AIMS
    figures["on"] = describe()
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps({name: figures[name] for name in figures if "by_process" in name}, indent=2))
    for name, aim in AIMS.items():
        print(f"{name}: {figures[name]:.3f}, {of_aim(figures[name], aim)}")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
