"""Which tiles of attention are fastest on this GPU (``paged_attention.tiles``).

    python -m ops.bench.gpu_tiles --out FOLDER [--only NAME ...] [--processes 8]

Candidates are compiled by many processes at once, then timed by a single one, which also compares
their results with those of the tile in use. ``FOLDER/gpu_tiles.json`` lists them by case, the
fastest first; candidates that do not fit on a multiprocessor are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from ops.bench.gpu_attention import Attention, Case, TorchAttention, cases, contiguous
from ops.bench.gpu_rig import PAGE_SIZE, Rig, difference
from ops.bench.hardware import describe
from triton.runtime.errors import OutOfResources

from pagemesh.kernels.layout import PageLayout
from pagemesh.kernels.paged_attention.tiles import Tile, decode_tile, prefill_tile
from pagemesh.kernels.triton_support import has_e4m3, has_wide_products

_BLOCKS, _STAGES = (32, 64, 128), (2, 3, 4)
_WARPS = {"decode": (2, 4, 8), "prefill": (4, 8)}
_PREFILL_ROWS = (64, 128)
_APART_MAX = 0.02
_PLACES = {
    "decode": "pagemesh.kernels.paged_attention.triton.decode_tile",
    "prefill": "pagemesh.kernels.paged_prefill.triton.prefill_tile",
}
Line = dict[str, Any]


def candidates(case: Case, own: Tile) -> list[Tile]:
    """All candidate tiles, the one in use first."""
    rows = (own.rows,) if case.kind == "decode" else _PREFILL_ROWS
    made = (
        replace(own, rows=each, block=block, warps=warps, stages=stages)
        for each, block, warps, stages in itertools.product(
            rows, _BLOCKS, _WARPS[case.kind], _STAGES
        )
    )
    return [own, *(tile for tile in made if tile != own)]


def own_tile(case: Case) -> Tile:
    """The tile that is in use for the case."""
    layout = PageLayout(1, case.kv_heads, case.head_dim, PAGE_SIZE, case.pages)
    if case.kind == "decode":
        return decode_tile(case.queries, layout, case.group, has_e4m3=has_e4m3())
    return prefill_tile(
        case.queries, layout, case.group, has_e4m3=has_e4m3(),
        has_wide_products=has_wide_products(),
    )  # fmt: skip


@contextmanager
def tile_of(case: Case, tile: Tile) -> Iterator[None]:
    with patch(_PLACES[case.kind], lambda *_given, **_named: tile):
        yield


def compile_one(asked: tuple[Case, Tile]) -> None:
    """Compile one candidate; runs in a pool of processes, and Triton caches the result on disk."""
    case, tile = asked
    small = replace(case, sequences=1, past=min(case.past, 600), rows=min(case.rows, 40))
    try:
        with torch.inference_mode(), tile_of(case, tile):
            Attention(Rig(), small)()
    except OutOfResources:
        return  # ``timed`` counts it


def timed(case: Case) -> Line:
    """Time the candidates of a case; the line has the fastest first. Raises what the tile in use
    raises."""
    rig = Rig()
    attend = Attention(rig, case)
    own = own_tile(case)
    lines: list[Line] = []
    too_large = 0
    with torch.inference_mode():
        expected = attend()
        own_ms = rig.timed_ms(attend)
        for tile in candidates(case, own):
            try:
                with tile_of(case, tile):
                    apart = difference(attend(), expected)
                    ms = rig.timed_ms(attend)
            except OutOfResources:
                too_large += 1
                continue
            if apart <= _APART_MAX:
                lines.append({**asdict(tile), "ms": round(ms, 4)})
            else:
                print(f"{case.name}: {tile} is off by {apart:.2g}", file=sys.stderr)
        torch_ms = 0.0
        if case.is_plain:
            k, v = contiguous(attend.pool, attend.batch, case)
            torch_ms = round(rig.timed_ms(TorchAttention(case, attend.q, k, v)), 4)
    return {
        "item": case.name, "own": {**asdict(own), "ms": round(own_ms, 4)}, "torch_ms": torch_ms,
        "tiles": sorted(lines, key=lambda line: float(line["ms"])), "too_large": too_large,
    }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results"))
    parser.add_argument("--only", nargs="+", default=[], help="cases of exactly these names")
    parser.add_argument("--processes", type=int, default=8)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        print("gpu_tiles: torch finds no CUDA device; run this where there is one", file=sys.stderr)
        return 2
    chosen = [case for case in cases() if not options.only or case.name in options.only]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        asked = [(case, tile) for case in chosen for tile in candidates(case, own_tile(case))]
        print(f"{len(asked)} candidates of {len(chosen)} cases", flush=True)
        for _ in pool.imap_unordered(compile_one, asked):
            pass
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for case in chosen:
        line = timed(case)
        results.append(line)
        best = line["tiles"][0]
        print(
            f"{case.name}: {line['own']['ms']} ms, best {best}, torch {line['torch_ms']}",
            flush=True,
        )
        head = {"benchmark": "gpu_tiles", **describe(), "device": torch.cuda.get_device_name()}
        (options.out / "gpu_tiles.json").write_text(
            json.dumps(head | {"results": results}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
