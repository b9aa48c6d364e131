"""How should K and V be laid out in a page? The measurements of ADR 0001.

    python -m ops.bench.bench_layout [--seconds 20] [--out ops/bench/results/layout.json]

Compares on real shared memory: pages that hold all layers (page-major) with a region per layer
(layer-major), K and V of a head side by side with K of all heads before V of all heads, and K as
rows ``[slot][head_dim]`` with K transposed ``[head_dim][slot]``. Variants take turns in one process
and medians are reported, so that a busy machine slows all alike.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from ops.bench.hardware import describe

LAYERS, KV_HEADS, HEAD_DIM, PAGES = 8, 8, 128, 512
CONTEXT_TOKENS = 8192
TURNS_MIN = 3
Floats = NDArray[np.float32]


class Shape(ctypes.Structure):
    """The probe's view of a layout; strides in floats."""

    _fields_ = [("base", ctypes.c_void_p)] + [
        (name, ctypes.c_long)
        for name in (
            "page_stride", "layer_stride", "head_stride", "value_offset", "layers", "kv_heads",
            "head_dim", "page_size", "group", "transposed",
        )
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """One layout of pages."""

    page_major: bool
    heads_whole: bool
    """K and V of each head side by side, instead of K of all heads before V of all heads."""
    transposed: bool

    @property
    def name(self) -> str:
        return "/".join(
            (
                "page-major" if self.page_major else "layer-major",
                "[head][kv]" if self.heads_whole else "[kv][head]",
                "K transposed" if self.transposed else "K rows",
            )
        )

    def shape(self, base: int, page_size: int, group: int) -> Shape:
        head = HEAD_DIM * page_size
        layer = 2 * KV_HEADS * head
        return Shape(
            base=base,
            page_stride=LAYERS * layer if self.page_major else layer,
            layer_stride=layer if self.page_major else layer * PAGES,
            head_stride=2 * head if self.heads_whole else head,
            value_offset=head if self.heads_whole else KV_HEADS * head,
            layers=LAYERS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            page_size=page_size,
            group=group,
            transposed=int(self.transposed),
        )


def compile_probe(folder: Path) -> ctypes.CDLL:
    source, target = Path(__file__).with_name("layout_probe.cpp"), folder / "probe.so"
    flags = ["-O3", "-march=native", "-mprefer-vector-width=512", "-ffast-math", "-Wno-psabi"]
    compiler = os.environ.get("CXX", "g++")
    subprocess.run(
        [compiler, *flags, "-shared", "-fPIC", str(source), "-o", str(target)], check=True
    )
    probe = ctypes.CDLL(str(target))
    probe.probe_stream.restype = ctypes.c_float
    return probe


def shared_floats(folder: Path, count: int) -> Floats:
    path = folder / "pool"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(descriptor, 0, 4 * count)
    floats = np.frombuffer(mmap.mmap(descriptor, 4 * count), np.float32)
    os.close(descriptor)
    floats[:] = 0.5
    return floats


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def jobs_of(
    probe: ctypes.CDLL, shape: Shape, page_size: int, random: np.random.Generator
) -> dict[str, Callable[[], object]]:
    """The timed jobs of one layout, by name."""
    view = ctypes.byref(shape)
    pages = CONTEXT_TOKENS // page_size
    table = random.permutation(PAGES)[: min(pages, PAGES)].astype(np.int32)
    query = random.standard_normal((KV_HEADS * shape.group, HEAD_DIM)).astype(np.float32)
    out = np.empty_like(query)
    chunk = random.standard_normal((2, 512, KV_HEADS, HEAD_DIM)).astype(np.float32)
    one_each = table[:32].astype(np.int64) * page_size + page_size // 2
    filled = (table[: 512 // page_size, None].astype(np.int64) * page_size) + np.arange(page_size)
    long_slots = np.ascontiguousarray(filled.reshape(-1))
    sources, targets = table[:32].copy(), table[32:64].copy()
    keep = (table, query, out, chunk, one_each, long_slots, sources, targets)

    def pointer(array: NDArray[np.generic]) -> ctypes.c_void_p:
        assert any(array is kept or array.base is kept for kept in keep)
        return ctypes.c_void_p(array.ctypes.data)

    k, v = chunk[0], chunk[1]
    return {
        "attend": lambda: probe.probe_attend(
            view, pointer(table), ctypes.c_long(len(table)), pointer(query), pointer(out)
        ),
        "write_decode_32_rows": lambda: probe.probe_write(
            view, pointer(one_each), ctypes.c_long(32), pointer(k), pointer(v)
        ),
        "write_chunk_512_rows": lambda: probe.probe_write(
            view, pointer(long_slots), ctypes.c_long(512), pointer(k), pointer(v)
        ),
        "copy_32_pages": lambda: probe.probe_copy(
            view, pointer(sources), pointer(targets), ctypes.c_long(32)
        ),
    }


def take_turns(
    probe: ctypes.CDLL, floats: Floats, jobs: list[dict[str, Callable[[], object]]], seconds: float
) -> tuple[float, list[dict[str, float]]]:
    """Stream bytes per second, and median seconds of every job, all in turns."""
    base, count = ctypes.c_void_p(floats.ctypes.data), ctypes.c_long(len(floats))
    streams: list[float] = []
    times: list[dict[str, list[float]]] = [{name: [] for name in named} for named in jobs]
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(streams) < TURNS_MIN:
        streams.append(seconds_of(lambda: probe.probe_stream(base, count)))
        for named, taken in zip(jobs, times, strict=True):
            for name, job in named.items():
                taken[name].append(seconds_of(job))
    medians = [{name: statistics.median(all_) for name, all_ in taken.items()} for taken in times]
    return floats.nbytes / statistics.median(streams), medians


def line_of(
    variant: Variant, page_size: int, group: int, stream: float, median: dict[str, float]
) -> dict[str, object]:
    read = min(CONTEXT_TOKENS, PAGES * page_size) * 2 * KV_HEADS * HEAD_DIM * 4 * LAYERS
    return {
        "page_size": page_size,
        "queries_per_kv_head": group,
        "variant": variant.name,
        "attend_gb_s": round(read / median["attend"] / 1e9, 2),
        "attend_of_stream": round(read / median["attend"] / stream, 3),
        "stream_gb_s": round(stream / 1e9, 2),
        "write_decode_us_row": round(median["write_decode_32_rows"] / 32e-6, 2),
        "write_chunk_us_row": round(median["write_chunk_512_rows"] / 512e-6, 2),
        "copy_us_page": round(median["copy_32_pages"] / 32e-6, 1),
    }


def measure(seconds: float) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    variants = [Variant(*flags) for flags in itertools.product((True, False), repeat=3)]
    combos = list(itertools.product((16, 32), (1, 4)))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        probe = compile_probe(Path(folder))
        for page_size, group in combos:
            random = np.random.default_rng(0)
            size = PAGES * LAYERS * 2 * KV_HEADS * HEAD_DIM * page_size
            floats = shared_floats(Path(folder), size)
            shapes = [variant.shape(floats.ctypes.data, page_size, group) for variant in variants]
            jobs = [jobs_of(probe, shape, page_size, random) for shape in shapes]
            stream, medians = take_turns(probe, floats, jobs, seconds / len(combos))
            lines += [
                line_of(variant, page_size, group, stream, median)
                for variant, median in zip(variants, medians, strict=True)
            ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path("ops/bench/results/layout.json"))
    options = parser.parse_args()
    lines = measure(options.seconds)
    for line in lines:
        print(
            f"{line['page_size']:>3} slots x{line['queries_per_kv_head']}  {line['variant']:<38}"
            f" attend {line['attend_gb_s']:>6} GB/s ({line['attend_of_stream']} of stream)"
            f"  write {line['write_decode_us_row']:>6} / {line['write_chunk_us_row']:>6} us a row"
            f"  copy {line['copy_us_page']} us a page"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"benchmark": "layout", **describe(), "one_thread": True, "results": lines}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
