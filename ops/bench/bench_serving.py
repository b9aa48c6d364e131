"""Serving, compared with other servers: each gets the same requests in turn, over HTTP.

    python -m ops.bench.bench_serving [--model FOLDER] [--vs NAME=URL ...] [--workloads NAME ...]

pagemesh is started here on ``FOLDER`` (without one, on a small random model made for the purpose),
or is found at ``--url``. With ``--prefill 0``, one worker computes both prompts and answers; with
``--bfloat16``, weights, rows, K and V are rounded to that type. You start the others, with the same
weights and as many threads: ops/bench/serving/README.md says how. Every round has new prompts,
which all servers get, one server after the other. Ratios are per round, of our figure to the best
peer's.

``--out`` keeps the rows of other models, set-ups and workloads, so that each can be measured at
another time, and rows with peers if this run has none. After each round the machine is measured,
too: what the floor of the steps would allow is reported beside the result (``serving/floor.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# isort: off
import ops.bench.as_workers  # noqa: F401  (before torch)

# isort: on
import uvloop
from ops.bench.hardware import describe
from ops.bench.no_drafts import NO_DRAFTS
from ops.bench.serving import floor, plot, table
from ops.bench.serving.load import Round, run_round
from ops.bench.serving.made_models import model_folder
from ops.bench.serving.workloads import WORKLOADS, Word, words_of_model
from tests.integration.mesh import Mesh

from pagemesh.cli.benching.client import RequestFailedError, Server, find_server

DEFAULT_MODEL = "S"
POOL_BYTES = 2 << 30
SETTLE_S = 1.5
"""Pause after each round: a worker of vLLM spins for another second."""


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or model_folder(DEFAULT_MODEL, None, Path(folder))
        words = words_of_model(model)
        try:
            peers = [
                find_server(name, url, plain=name in arguments.plain) for name, url in arguments.vs
            ]
            with (
                ours(model, arguments) as own,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                rows = runner.run(measure([own, *peers], model, words, arguments))
        except RequestFailedError as error:
            raise SystemExit(str(error)) from error
    print(table.as_text(rows))
    print(f"written to {arguments.out}")
    if arguments.plot:
        plot.draw(rows, arguments.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="Hugging Face folder that every server serves")
    parser.add_argument(
        "--label", help="what the table calls the model, before the set-up; default: its folder"
    )
    parser.add_argument("--url", help="a pagemesh that runs already; default: one is started")
    parser.add_argument(
        "--prefill", type=int, default=1, help="prefill workers of the pagemesh that is started"
    )
    parser.add_argument(
        "--bfloat16", action="store_true", help="start it with --dtype and --kv-dtype bfloat16"
    )
    parser.add_argument(
        "--vs", type=named_url, action="append", default=[], metavar="NAME=URL", help="a peer"
    )
    parser.add_argument(
        "--plain", action="append", default=[], metavar="NAME",
        help="this peer takes text only, and no field that OpenAI does not have",
    )  # fmt: skip
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", default="1", help="prompts; a seed used before meets its cache")
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/serving.json"))
    parser.add_argument("--plot", type=Path, help="also draw every row of the report here")
    return parser.parse_args()


def named_url(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or name == table.OURS or not url.startswith("http://"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT of a peer")
    return name, url


@contextmanager
def ours(model: Path, arguments: argparse.Namespace) -> Iterator[Server]:
    """The pagemesh at ``--url``, or one that lives as long as the context."""
    if arguments.url:
        yield find_server(table.OURS, arguments.url)
        return
    types = dict.fromkeys(("PAGEMESH_DTYPE", "PAGEMESH_KV_DTYPE"), "bfloat16")
    env = NO_DRAFTS | (types if arguments.bfloat16 else {})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        pool_dir = Path(folder) / "mesh"
        pool_dir.mkdir()
        with Mesh(
            pool_dir, model=model, prefill=arguments.prefill, pool_bytes=POOL_BYTES, env=env
        ) as mesh:
            yield find_server(table.OURS, mesh.url)


async def measure(
    servers: Sequence[Server], model: Path, words: list[Word], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of the report. Each is written as soon as its workload has been measured. Raises
    ``RequestFailedError``."""
    kinds = ", one worker" * (not arguments.prefill) + ", bfloat16" * arguments.bfloat16
    label = (arguments.label or model.name) + kinds
    shape, threads = floor.shape_of(model), os.cpu_count() or 1
    on = describe()  # first, as the tree may change meanwhile
    rows: list[dict[str, Any]] = []
    for name in arguments.workloads:
        rounds: dict[str, list[Round]] = {server.name: [] for server in servers}
        floors: list[float] = []
        for turn in range(arguments.rounds):
            for server in servers:
                seed = f"{arguments.seed} {name} {turn}"
                found = await run_round(server, WORKLOADS[name], words, seed)
                rounds[server.name].append(found)
                print(f"{label} {name}: {server.name} {found.as_json()}", flush=True)
                await asyncio.sleep(SETTLE_S)
                machine = floor.probe(threads)
                floors.append(floor.floor_tokens_s(shape, WORKLOADS[name], machine))
        rows = keep(table.row(label, name, rounds, floors) | {"on": on}, arguments.out)
    return rows


def keep(row: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Put ``row`` into the report at ``path``; returns all of its rows."""
    report = json.loads(path.read_text()) if path.exists() else {}
    rows = table.merged(report, [row])
    path.write_text(json.dumps({"benchmark": "serving", "rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
