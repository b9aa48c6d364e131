"""Every GPU kernel against its reference and the device's limits, in one command.

``python -m ops.bench.gpu --out FOLDER`` on a machine with a CUDA device: checks each kernel's
numbers against plain torch on the same device, times it, and prints bandwidth and arithmetic as
fractions of what the same device copied and multiplied in the same run; then whole decode steps
with and without graphs. Attention is also compared with torch's own on contiguous K and V. An
item that fails is reported and the rest goes on; ``FOLDER/gpu.json`` keeps it all. The exit
status is 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from ops.bench.gpu_items import Limits, Result, items
from ops.bench.hardware import describe

_COPY_BYTES = 1 << 30
_SQUARE = 8192


def limits() -> Limits:
    """What this device does at best: a copy of a gibibyte, a product of two large matrices."""
    from triton.testing import do_bench

    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    square = torch.randn(_SQUARE, _SQUARE, dtype=torch.bfloat16, device="cuda")
    copy_ms = do_bench(lambda: target.copy_(source))
    product_ms = do_bench(lambda: square @ square)
    return Limits(
        bandwidth_bytes=2 * _COPY_BYTES / copy_ms * 1e3,
        flops_per_s=2 * _SQUARE**3 / product_ms * 1e3,
    )


def run_item(name: str, item: Callable[[Limits], Result], best: Limits) -> dict[str, object]:
    """The item's line of the report; a failure is one, too."""
    try:
        with torch.inference_mode():
            return {"item": name, **item(best).line()}
    except Exception as error:
        traceback.print_exc()
        torch.cuda.empty_cache()
        return {"item": name, "ok": False, "reason": f"{type(error).__name__}: {error}"[:500]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results"))
    parser.add_argument("--only", default="", help="items whose name holds this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu: torch finds no CUDA device; run this where there is one", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    best = limits()
    print(
        f"copy {best.bandwidth_bytes / 1e9:.0f} GB/s  product {best.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    lines = []
    for name, item in items().items():
        if options.only not in name:
            continue
        line = run_item(name, item, best)
        print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
        lines.append(line)
    report = {
        "benchmark": "gpu", **describe(), "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "copy_gb_s": round(best.bandwidth_bytes / 1e9),
        "product_tflop_s": round(best.flops_per_s / 1e12), "results": lines,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    failed = [line["item"] for line in lines if not line["ok"]]
    print(f"gpu: {len(lines) - len(failed)} of {len(lines)} items are right", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
