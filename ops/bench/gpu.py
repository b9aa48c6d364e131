"""Checks and times the kernels of a GPU, and the whole mesh on one GPU, in one command.

``python -m ops.bench.gpu --out FOLDER`` on a machine with a CUDA device, in two parts:

    kernels  every kernel, at the shapes of real models: its results against plain torch on the same
             device; its time; bandwidth and arithmetic as fractions of what the device reached in
             the same run in copies and products (with float32 queries: in torch's float32 products,
             which tf32 in parts may exceed). Attention for every type of pages and for several
             widths, groups, windows and caps, compared with torch's own over contiguous K and V if
             torch supports the case. Whole decode steps with and without graphs
    mesh     ``pagemesh up --device cuda`` on random models: tokens against the engine of the CPU,
             also from the cache and after processes died; tokens a second, time to first token,
             time between tokens (``ops.bench.gpu_mesh``)

An item that fails is reported, and the others still run. ``FOLDER/gpu.json`` is written after each
item, so that results are kept when time runs out. The exit status is 1 if anything failed.
``--trial`` runs small versions of both parts on a machine without a GPU, in Triton's interpreter,
to check that they work; it writes nothing, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ops.bench.gpu_items import items
from ops.bench.gpu_rig import Limits, Result, Rig
from ops.bench.hardware import describe

_COPY_BYTES = 1 << 30
_SQUARE = 8192
PARTS = ("kernels", "mesh")

Line = dict[str, Any]


def limits() -> Limits:
    """What this device reaches at best: copying a gibibyte, multiplying large matrices."""
    from triton.testing import do_bench

    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    square = torch.randn(_SQUARE, _SQUARE, dtype=torch.float32, device="cuda")
    half = square.bfloat16()
    copy_ms = do_bench(lambda: target.copy_(source))
    half_ms, float32_ms = do_bench(lambda: half @ half), do_bench(lambda: square @ square)
    return Limits(
        bandwidth_bytes=2 * _COPY_BYTES / copy_ms * 1e3,
        flops_per_s=2 * _SQUARE**3 / half_ms * 1e3,
        float32_flops_per_s=2 * _SQUARE**3 / float32_ms * 1e3,
    )


def run_item(name: str, item: Callable[[Limits], Result], best: Limits) -> Line:
    """Run an item; returns its line of the report, also for a failure."""
    try:
        with torch.inference_mode():
            return {"item": name, **item(best).line()}
    except Exception as error:
        traceback.print_exc()
        torch.cuda.empty_cache()
        return failed(name, error)


def failed(name: str, error: Exception) -> Line:
    return {"item": name, "ok": False, "reason": f"{type(error).__name__}: {error}"[:500]}


class Report:
    """Lines by item, in a file that is replaced atomically."""

    def __init__(self, path: Path | None, head: Line) -> None:
        self._path, self._head = path, head
        self._lines: dict[str, Line] = {}

    def keep(self, line: Line) -> None:
        """Add the line of an item, or replace it."""
        self._lines[line["item"]] = line
        if self._path is None:
            return
        fresh = self._path.with_suffix(".new")
        text = json.dumps(self._head | {"results": [*self._lines.values()]}, indent=1)
        fresh.write_text(text + "\n")
        fresh.replace(self._path)

    @property
    def wrong(self) -> list[str]:
        """The items that failed."""
        return [name for name, line in self._lines.items() if not line["ok"]]

    def __len__(self) -> int:
        return len(self._lines)


def run_kernels(options: argparse.Namespace, report: Report, best: Limits) -> None:
    for name, item in items(Rig(is_trial=options.trial)).items():
        if options.only in name and not _is_late(options):
            line = run_item(name, item, best)
            print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
            report.keep(line)


def run_meshes(options: argparse.Namespace, report: Report) -> None:
    # Imported late: it loads Triton, which reads TRITON_INTERPRET at import.
    from ops.bench.gpu_mesh import CASES, TRIAL, run_case

    for case in (TRIAL,) if options.trial else CASES:
        if options.only not in case.name or _is_late(options):
            continue
        print(case.name, flush=True)
        last: list[Line] = []

        def keep(line: Line, last: list[Line] = last) -> None:
            last[:] = [line]
            report.keep(dict(line))
            name, value = list(line.items())[-1]
            print(f"  {name}: {value}", flush=True)

        try:
            run_case(case, keep)
        except Exception as error:
            traceback.print_exc()
            report.keep((last[0] if last else {}) | failed(case.name, error))


def _is_late(options: argparse.Namespace) -> bool:
    return bool(time.monotonic() > options.until_s)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results"))
    parser.add_argument("--only", default="", help="items whose name holds this")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--minutes", type=float, default=25.0, help="begin no item later than this")
    parser.add_argument("--trial", action="store_true", help="small, without a GPU")
    options = parser.parse_args()
    options.until_s = time.monotonic() + 60 * options.minutes
    return options


def main() -> int:
    options = parse()
    if options.trial:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
        report = Report(None, {})
        if "kernels" in options.parts:
            run_kernels(options, report, Limits(1.0, 1.0, 1.0))
        if "mesh" in options.parts:
            run_meshes(options, report)
        print(*report.wrong)
        return 1 if report.wrong or not len(report) else 0
    if not torch.cuda.is_available():
        print("gpu: torch finds no CUDA device; run this where there is one", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    best = limits()
    torch.cuda.empty_cache()
    print(
        f"copy {best.bandwidth_bytes / 1e9:.0f} GB/s  product {best.flops_per_s / 1e12:.0f} TFLOP/s"
        f"  of float32 {best.float32_flops_per_s / 1e12:.0f}"
    )
    head = {
        "benchmark": "gpu", **describe(), "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "copy_gb_s": round(best.bandwidth_bytes / 1e9),
        "product_tflop_s": round(best.flops_per_s / 1e12),
        "float32_product_tflop_s": round(best.float32_flops_per_s / 1e12),
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options.out / "gpu.json", head)
    if "kernels" in options.parts:
        run_kernels(options, report, best)
    torch.cuda.empty_cache()  # leaves the device's memory to the mesh
    if "mesh" in options.parts:
        run_meshes(options, report)
    print(f"gpu: {len(report) - len(report.wrong)} of {len(report)} items are right", *report.wrong)
    return 1 if report.wrong or not len(report) else 0


if __name__ == "__main__":
    sys.exit(main())
