"""How much of a step in the whole mesh is arithmetic, and how much Python and the bus take.

    python -m ops.bench.bench_share [--models S M] [--models-in FOLDER] [--rounds 5] [--prefill 1]
        [--out PATH]

Runs ``single`` and ``8 at once`` of the serving benchmark, over HTTP. The time of decoding is that
in which all answers have begun and none has ended, as the client sees it: from the last first text
to the first last text. Workers record their steps meanwhile (``step_clock``). That time is split
into:

    native    in steps: products, attention, other rows, sampling. Includes the time that threads of
              a step wait for each other because another process has a core
    executor  Python around steps: checking leases, making arrays, unpacking results
    between   from one call of the executor to the next: the step thread waits for the worker's
              loop, which plans, sends and asks the pager, or for its turn
    ends      before the first call and after the last: the handover, and the way through the bus
              and the gateway to the client

``outside`` is the share of all but the first; the aim is at most 15% on S, 5% on M. Each such round
is followed by one in which each step is a call by itself, which separates products, attention, rows
and sampling; nothing else of it counts. Figures are medians over answers or rounds, in milliseconds
a step. Rows of an earlier run with the same model and workload are replaced.

``--models-in`` has folders of these names (``serving.random_model``); otherwise they are made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from numpy.typing import NDArray
from ops.bench.aims import OUTSIDE_STEPS, of_aim
from ops.bench.hardware import describe
from ops.bench.no_drafts import NO_DRAFTS
from ops.bench.serving.load import ask_everyone
from ops.bench.serving.made_models import model_folder
from ops.bench.serving.workloads import WORKLOADS, Word, words_of_model
from ops.bench.step_clock.sitecustomize import FIELDS
from tests.integration.mesh import Mesh

from pagemesh.cli.benching.client import Reply, Server, find_server

ASKED = ("single", "8 at once")
PARTS = ("products", "attention", "rows", "sampling")
OTHERS = ("executor", "between", "ends")
CLOCK = Path(__file__).parent / "step_clock"
POOL_BYTES = 1 << 30
Window = tuple[float, float]
"""Start and end, in seconds of the performance counter."""
Calls = NDArray[np.float64]
"""[calls, FIELDS], ordered by their start."""


@dataclass(frozen=True, slots=True)
class Split:
    """Where the time of one window went, in seconds. ``steps`` may be fractional. ``parts_s``: the
    parts of ``native_s``, recorded if steps were separate calls."""

    steps: float
    wall_s: float
    native_s: float
    executor_s: float
    between_s: float
    ends_s: float
    parts_s: tuple[float, ...]

    @property
    def outside(self) -> float:
        return 1.0 - self.native_s / self.wall_s


def windows_of(replies: Sequence[Reply], users: int) -> list[Window]:
    """The times in which all answers had begun and none had ended: one window for each ``users``
    answers, which were requested together."""
    found = []
    for first in range(0, len(replies), users):
        timed = [one.arrivals_s for one in replies[first : first + users] if one.arrivals_s]
        if timed:
            window = max(times[0] for times in timed), min(times[-1] for times in timed)
            if window[0] < window[1]:
                found.append(window)
    return found


def split(calls: Calls, window: Window) -> Split | None:
    """Split ``window`` by the calls of all workers; a call that is partly inside counts in
    proportion. None if no step was computed in it."""
    since_s, until_s = window
    began = np.maximum(calls[:, 0], since_s)
    ended = np.minimum(calls[:, 1], until_s)
    inside = began < ended
    if not inside.any():
        return None
    calls, began, ended = calls[inside], began[inside], ended[inside]
    weights = (ended - began) / (calls[:, 1] - calls[:, 0])
    steps, *spent_s = (weights @ calls[:, 2:]).tolist()
    computing_s = float((ended - began).sum())
    whole_s = float(ended.max() - began.min())
    return Split(
        steps=steps,
        wall_s=until_s - since_s,
        native_s=sum(spent_s),
        executor_s=computing_s - sum(spent_s),
        between_s=whole_s - computing_s,
        ends_s=until_s - since_s - whole_s,
        parts_s=tuple(spent_s[1:]),
    )


def row_of(counted: Sequence[Split], apart: Sequence[Split]) -> dict[str, Any]:
    """Medians over windows: milliseconds a step, and the share ``outside``."""

    def a_step(seconds: Iterable[tuple[float, Split]]) -> float:
        return round(1e3 * statistics.median(spent / one.steps for spent, one in seconds), 3)

    return {
        "windows": len(counted),
        "outside": round(statistics.median(one.outside for one in counted), 4),
        "outside_min": round(min(one.outside for one in counted), 4),
        "outside_max": round(max(one.outside for one in counted), 4),
        "step_ms": {
            name: a_step((getattr(one, f"{name}_s"), one) for one in counted)
            for name in ("wall", "native", *OTHERS)
        },
        "by_itself_ms": {
            name: a_step((one.parts_s[place], one) for one in apart)
            for place, name in enumerate(PARTS)
        },
    }


def calls_in(folder: Path) -> Calls:
    """The calls that the workers of a mesh wrote to ``folder`` when they ended."""
    found = [np.fromfile(path).reshape(-1, len(FIELDS)) for path in folder.glob("*.steps")]
    calls = np.concatenate(found)
    ordered: Calls = calls[calls[:, 0].argsort()]
    return ordered


async def ask(
    server: Server, words: list[Word], rounds: int, apart: mmap
) -> dict[tuple[str, bool], list[Window]]:
    """The windows of decoding, by workload and by whether each step was a separate call. Raises
    ``RequestFailedError``."""
    windows: dict[tuple[str, bool], list[Window]] = {}
    for name in ASKED:
        workload = WORKLOADS[name]
        for number in range(-1, 2 * rounds):  # the first warms up
            is_apart = number % 2 == 1
            apart[0] = is_apart
            replies, _ = await ask_everyone(server, workload, words, f"share {name} {number}")
            if number >= 0:
                found = windows_of(replies, workload.users)
                windows.setdefault((name, is_apart), []).extend(found)
    return windows


def measure(name: str, model: Path, folder: Path, options: argparse.Namespace) -> list[Any]:
    (folder / "mesh").mkdir()
    (folder / "apart").write_bytes(b"\0")
    env = NO_DRAFTS | {"BENCH_STEP_CLOCK": str(folder), "PYTHONPATH": str(CLOCK)}
    with (
        Mesh(
            folder / "mesh", model=model, prefill=options.prefill, pool_bytes=POOL_BYTES, env=env
        ) as mesh,
        (folder / "apart").open("r+b") as file,
        mmap(file.fileno(), 1) as apart,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        server = find_server("pagemesh", mesh.url)
        windows = runner.run(ask(server, words_of_model(model), options.rounds, apart))
    calls = calls_in(folder)
    rows = []
    for workload in ASKED:
        counted, told = (
            [one for window in windows[workload, kind] if (one := split(calls, window))]
            for kind in (False, True)
        )
        label = name + ", one worker" * (not options.prefill)
        rows.append({"model": label, "workload": workload, **row_of(counted, told)})
        rows[-1] |= {"rounds": options.rounds, "on": describe()}
        print(row_text(rows[-1]), flush=True)
    return rows


def row_text(row: dict[str, Any]) -> str:
    step = row["step_ms"]
    parts = ", ".join(f"{name} {value:.2f}" for name, value in row["by_itself_ms"].items())
    others = ", ".join(f"{name} {step[name]:.2f}" for name in OTHERS)
    aim = OUTSIDE_STEPS.get(row["model"].split(",")[0])
    stands = f", {of_aim(row['outside'], aim)}" if aim else ""
    return (
        f"{row['model']} {row['workload']}: {step['wall']:.2f} ms a step, native "
        f"{step['native']:.2f} (by itself: {parts}), {others}: {row['outside']:.1%} outside{stands}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["S", "M"], choices=["S", "M", "L"])
    parser.add_argument("--models-in", type=Path, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers")
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/share.json"))
    options = parser.parse_args()
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    for name in options.models:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            model = model_folder(name, options.models_in, Path(folder))
            new = measure(name, model, Path(folder), options)
        places = {(row["model"], row["workload"]) for row in new}
        rows = [row for row in rows if (row["model"], row["workload"]) not in places] + new
    rows.sort(key=lambda row: (row["model"], row["workload"]))
    options.out.write_text(json.dumps({"benchmark": "share", "rows": rows}, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
