"""How long ``pagemesh up`` takes until its ready line, and how much memory its processes use.

    python -m ops.bench.bench_start [--models demo S M] [--models-in FOLDER] [--starts 5]
        [--prefill 1] [--out PATH]

Seconds from the command to the ready line, medians over starts: *cold*, without prepared weights,
and *prepared*, with those of an earlier start. The model's files have been read before, so the page
cache holds them; if it did not, a start would wait for the disk.

After the last start, the mesh gives eight answers of 64 tokens to prompts of 128 at once. Then the
memory of each process is read, in megabytes (10**6): ``pss_mb``, its proportional share of all
mapped memory; of that ``pool_mb``, the pool file, and ``other_mb``, the rest, prepared weights
included. Other processes on the machine that have torch mapped lower the share of its libraries.
The pool has the default size of ``up``, and is zeroed when it is made. ``--models-in`` has folders
of these names (``serving.random_model``); otherwise S, M and L are made. ``demo`` is the bundled
model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop
from ops.bench.hardware import describe
from ops.bench.serving.made_models import model_folder
from tests.integration.mesh import Mesh

from pagemesh.cli.benching.client import Server, complete, find_server
from pagemesh.runtime.model_folder import find_model
from pagemesh.runtime.settings import PagerConfig

DEMO = "demo"
USERS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 128, 64
TOKENS = 200
"""Token ids below this are in the vocabulary of every model."""
_KB = 1_024


def memory_mb(rollup: str) -> dict[str, float]:
    """Memory in units of 10**6 bytes, from the text of ``/proc/PID/smaps_rollup``. Raises
    ``ValueError`` if a field is missing."""
    fields = dict(line.split(":", 1) for line in rollup.splitlines()[1:] if ":" in line)
    found = {}
    for name, field in (("pss_mb", "Pss"), ("pool_mb", "Pss_Shmem")):
        if field not in fields:
            raise ValueError(f"smaps_rollup has no {field}")
        found[name] = int(fields[field].split()[0]) * _KB / 1e6
    found["other_mb"] = found["pss_mb"] - found["pool_mb"]
    return {name: round(value, 1) for name, value in found.items()}


def memory_of(pids: Mapping[str, int]) -> dict[str, dict[str, float]]:
    return {
        name: memory_mb(Path(f"/proc/{pid}/smaps_rollup").read_text()) for name, pid in pids.items()
    }


async def ask(server: Server) -> None:
    """A round of answers. Raises ``RequestFailedError``."""
    draw = random.Random(1)
    async with asyncio.TaskGroup() as group:
        for _ in range(USERS):
            prompt = [draw.randrange(TOKENS) for _ in range(PROMPT_TOKENS)]
            group.create_task(complete(server, prompt, OUTPUT_TOKENS))


def measure(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A line of the report."""
    ready_s: dict[str, list[float]] = {"cold": [], "prepared": []}
    memory: dict[str, dict[str, float]] = {}
    for _ in range(options.starts):
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
            # Not in /tmp, which is in memory on some systems and would count as ``pool_mb``.
            tempfile.TemporaryDirectory(dir="/var/tmp") as prepared,
        ):
            for kind, found in ready_s.items():  # the second start uses the first's weights
                pool_dir = Path(folder) / kind
                pool_dir.mkdir()
                with Mesh(
                    pool_dir,
                    model=model,
                    prefill=options.prefill,
                    pool_bytes=PagerConfig().pool_bytes,
                    env={"PAGEMESH_CACHE_DIR": prepared},
                ) as mesh:
                    found.append(mesh.start_seconds)
                    if kind == "prepared" and len(found) == options.starts:
                        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                            runner.run(ask(find_server("pagemesh", mesh.url)))
                        memory = memory_of(mesh.pids() | {"up": mesh.up_pid})
    return {
        "model": name + ", one worker" * (not options.prefill),
        "starts": options.starts,
        "pool_mb": PagerConfig().pool_bytes / 1e6,
        "ready_s": {kind: round(statistics.median(found), 2) for kind, found in ready_s.items()},
        "ready_s_each": {kind: [round(one, 2) for one in ready_s[kind]] for kind in ready_s},
        "memory": memory,
        "on": describe(),
    }


def row_text(row: Mapping[str, Any]) -> str:
    memory, ready = row["memory"], row["ready_s"]
    each = ", ".join(f"{name} {found['other_mb']:.0f}" for name, found in memory.items())
    total = sum(found["other_mb"] for found in memory.values())
    pool = sum(found["pool_mb"] for found in memory.values())
    return (
        f"{row['model']}: ready after {ready['cold']:.2f} s cold, {ready['prepared']:.2f} s "
        f"prepared; {total:.0f} MB beside {pool:.0f} MB of shared pages: {each}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[DEMO, "S", "M"])
    parser.add_argument("--models-in", type=Path, metavar="FOLDER")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers")
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/start.json"))
    options = parser.parse_args()
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for name in options.models:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
            if name == DEMO:
                model = find_model("").path
            else:
                model = model_folder(name, options.models_in, Path(made))
            new = measure(name, model, options)
        print(row_text(new), flush=True)
        rows = [row for row in rows if row["model"] != new["model"]] + [new]
    rows.sort(key=lambda row: (row["model"] != DEMO, row["model"]))
    options.out.write_text(json.dumps({"benchmark": "start", "rows": rows}, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
