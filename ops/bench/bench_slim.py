"""Are products with bfloat16 weights in twelve bits faster than with sixteen?

    python -m ops.bench.bench_slim [--model M] [--rounded] [--turns 15] [--threads 2] [--out PATH]

Multiplies with all matrices of every layer of a model of ``random_models``, one after the other;
the two kinds of weights take turns, and hold the same random numbers. With ``--rounded`` the rows
are rounded to bfloat16. The reported ratio is the median over turns. Each product is a separate
call, which costs both kinds the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from ops.bench.hardware import describe
from ops.bench.random_models import SHAPES, random_config

from pagemesh.engine.weights import recipes
from pagemesh.kernels.dispatch import use_threads
from pagemesh.kernels.native.library import cpu_level
from pagemesh.kernels.ops import PackedLinear, linear, pack_linear
from pagemesh.kernels.weight_types import WeightType

KINDS: tuple[WeightType, ...] = ("bfloat16", "slim_bfloat16")
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 128)


def matrices(model: str, rounded: bool) -> dict[WeightType, list[PackedLinear]]:
    """The matrices of all layers, in both kinds."""
    torch.manual_seed(0)
    made: dict[WeightType, list[PackedLinear]] = {kind: [] for kind in KINDS}
    for recipe in recipes(random_config(model)):
        if recipe.matrix and recipe.name.startswith("layers."):
            weight = 0.02 * torch.randn(recipe.shape)
            for kind, packed in made.items():
                packed.append(pack_linear(weight, weight_type=kind, rounds_rows=rounded))
    return made


def measure(made: dict[WeightType, list[PackedLinear]], rows: int, turns: int) -> dict[str, float]:
    """Milliseconds of a turn of each kind, and the ratio of twelve bits to sixteen."""
    widths = {packed.k for own in made.values() for packed in own}
    inputs = {k: torch.randn(rows, k) for k in widths}
    times_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(turns):
        for kind, own in made.items():
            start = time.perf_counter()
            for packed in own:
                linear(inputs[packed.k], packed)
            times_ms[kind].append(1e3 * (time.perf_counter() - start))
    plain, slim = (times_ms[kind] for kind in KINDS)
    found = {f"{kind}_ms": round(statistics.median(own), 2) for kind, own in times_ms.items()}
    ratios = [a / b for a, b in zip(slim, plain, strict=True)]
    return found | {"ratio": round(statistics.median(ratios), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="M")
    parser.add_argument("--rounded", action="store_true", help="round rows to bfloat16")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    use_threads(options.threads)
    made = matrices(options.model, options.rounded)
    sizes = [sum(packed.panels.nbytes for packed in made[kind]) for kind in KINDS]
    print(f"{options.model}: {sizes[1] / sizes[0]:.3f} of the memory")
    lines = []
    for rows in ROWS:
        found = measure(made, rows, options.turns)
        lines.append({"rows": rows, **found})
        print(f"{rows:4} rows: {found['ratio']:.3f} of the time")
    if options.out:
        about = {"on": describe(), "level": cpu_level().name.lower(), "model": options.model}
        about |= {"is_rounded": options.rounded}
        done = about | {"bytes": sizes, "results": lines}
        options.out.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
