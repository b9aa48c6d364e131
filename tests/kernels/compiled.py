"""Compiles every kernel, as its launcher would launch it, for a GPU that does not exist.

``python -m tests.kernels.compiled ARCH FOLDER``, in a process of its own, since the interpreter of
the other tests replaces the compiler for good. A stand-in for the driver names the target, launches
only compile, and ``FOLDER/report.json`` describes the results. With ``every`` as a third argument
it compiles attention at all types and shapes instead, and reports what each takes and what is
wrong.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from tests.kernels.compiled_attention import FEW, every_attention, launches
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pagemesh.kernels import triton_support
from pagemesh.kernels.add_rms_norm import triton as add_rms_norm
from pagemesh.kernels.kv_write import triton as kv_write
from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.merge_states import triton as merge_states
from pagemesh.kernels.ops import KvPool, PageLayout, ragged_batch
from pagemesh.kernels.page_copy import triton as page_copy
from pagemesh.kernels.paged_attention import triton as paged_attention
from pagemesh.kernels.paged_prefill import triton as paged_prefill
from pagemesh.kernels.quantise import triton as quantise
from pagemesh.kernels.rms_norm import triton as rms_norm
from pagemesh.kernels.rope import triton as rope
from pagemesh.kernels.rope_kv_write import triton as rope_kv_write
from pagemesh.kernels.silu_mul import triton as silu_mul

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HEADS, ROWS = 8, 4
SHARED_BYTES_MAX = {80: 163 << 10, 90: 227 << 10}
"""Maximum shared memory of one program on a multiprocessor (CUDA programming guide)."""
PRODUCTS = ("_attend_span", "_attend_rows")
LOAD = r"\b(?:LDG|LDGSTS)\.E[.\w]*"


@dataclass(frozen=True, slots=True)
class Compiled:
    """The resources of a compiled kernel. ``spills`` are instructions that move a thread's
    registers to memory and back."""

    case: str
    kernel: str
    registers: int
    spills: int
    shared_bytes: int
    matrix_instructions: int
    wide_loads: int
    """Instructions that load 16 bytes per thread; ``half_wide_loads``: 8 bytes."""
    half_wide_loads: int


class StandInDriver:
    """Names a target without a device."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def cases() -> dict[str, Callable[[], object]]:
    """Launches, by name, at the shapes of real models."""
    wide = torch.zeros(ROWS, 4096, dtype=torch.bfloat16)
    norm = wide[0].clone()
    q = torch.zeros(ROWS, HEADS, 128, dtype=torch.bfloat16)
    states = torch.zeros(ROWS, HEADS, 4, 128)
    rows = torch.zeros(ROWS, 128)
    return {
        "merge": lambda: merge_states.merge_states(states, states[..., 0].contiguous()),
        "quantise int8": lambda: quantise.quantise(rows, torch.int8),
        "quantise e4m3": lambda: quantise.quantise(rows, torch.float8_e4m3fn),
        "dequantise": lambda: quantise.dequantise(rows.to(torch.float8_e4m3fn), torch.ones(ROWS)),
        "rms_norm": lambda: rms_norm.rms_norm(wide, norm, 1e-6),
        "add_rms_norm": lambda: add_rms_norm.add_rms_norm(wide, wide.clone(), norm, 1e-6),
        "rope": lambda: rope.rope(q, torch.zeros(ROWS, 64), torch.zeros(ROWS, 64)),
        "silu_mul": lambda: silu_mul.silu_mul(wide),
        **page_cases("bfloat16"),
        **page_cases("int8"),
        **page_cases("e4m3"),
        **launches(FEW),
    }


def page_cases(dtype: KvDtype) -> dict[str, Callable[[], object]]:
    """Launches over pages of ``dtype``."""
    pool = KvPool.allocate(PageLayout(2, 2, 128, 16, dtype), 32)
    tables = [np.arange(8, dtype=np.uint32) for _ in range(ROWS)]
    batch = ragged_batch(tables, [100] * ROWS, [1] * ROWS, 16)
    norm = torch.zeros(128, dtype=torch.bfloat16)
    q = torch.zeros(ROWS, HEADS, 128, dtype=torch.bfloat16)
    joined = torch.zeros(ROWS, HEADS + 4, 128, dtype=torch.bfloat16)
    angles = (torch.zeros(ROWS, 64), torch.zeros(ROWS, 64))
    found: dict[str, Callable[[], object]] = {
        "decode": lambda: paged_attention.paged_attention(q, pool, 0, batch, 0.1, spans=4),
        "prefill": lambda: paged_prefill.paged_prefill(q, pool, 0, batch, 0.1),
        "kv_write": lambda: kv_write.kv_write(q[:, :2], q[:, 2:4], pool, 0, batch.slots),
        "rope_kv_write": lambda: rope_kv_write.rope_kv_write(
            joined, angles, pool, 0, batch.slots, (norm, norm), 1e-6
        ),
    }
    if dtype == "bfloat16":
        found |= {
            "decode, window and cap": lambda: paged_attention.paged_attention(
                q, pool, 0, batch, 0.1, spans=4, window_tokens=64, soft_cap=30.0
            ),
            "page_copy": lambda: page_copy.page_copy(pool, [(0, 1)]),
        }
    return {f"{name}, {dtype}": launch for name, launch in found.items()}


def measured(case: str, kernel: Any, folder: Path) -> Compiled:
    """The resources of a kernel's machine code, according to the compiler's tools."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    usage = _run("cuobjdump", "-res-usage", binary)
    assembly = _run("nvdisasm", "-c", binary)

    def used(what: str) -> int:
        return int(re.findall(rf"\b{what}:(\d+)", usage)[-1])

    return Compiled(
        case=case,
        kernel=kernel.metadata.name,
        registers=used("REG"),
        spills=len(re.findall(r"\b(?:STL|LDL)\b", assembly)),
        shared_bytes=kernel.metadata.shared,
        matrix_instructions=len(re.findall(r"\b(?:HMMA|HGMMA|IMMA|IGMMA|QGMMA|DMMA)\b", assembly)),
        wide_loads=len(re.findall(rf"{LOAD}\.128\b", assembly)),
        half_wide_loads=len(re.findall(rf"{LOAD}\.64\b", assembly)),
    )


def _run(tool: str, *arguments: object) -> str:
    done = subprocess.run(
        [TOOLS / tool, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return done.stdout


def wrong(arch: int, kernel: Compiled) -> list[str]:
    """What is wrong with a kernel: resources it takes too much of, or instructions it lacks."""
    found = []
    if kernel.spills:
        found.append(f"{kernel.spills} spills")
    if kernel.shared_bytes > SHARED_BYTES_MAX[arch]:
        found.append(f"{kernel.shared_bytes} bytes of shared memory")
    if kernel.kernel in PRODUCTS and not kernel.matrix_instructions:
        found.append("no matrix instruction")
    return found


def compile_all(
    arch: int, folder: Path, chosen: dict[str, Callable[[], object]]
) -> Iterator[Compiled]:
    """Compile the kernels of the launches ``chosen``, one after the other."""
    driver.set_active(StandInDriver(arch))
    triton_support.device_type = lambda: "cpu"
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, **options: Any) -> None:
        compiled.append(run(self, *arguments, **options | {"warmup": True}))

    JITFunction.run = compile_only
    for name, launch in chosen.items():
        compiled.clear()
        launch()
        for kernel in compiled:
            yield measured(name, kernel, folder)


def main(arch: int, folder: Path, *, every: bool) -> None:
    report = []
    for kernel in compile_all(arch, folder, launches(every_attention()) if every else cases()):
        report.append(asdict(kernel))
        if every and kernel.kernel in PRODUCTS:
            sys.stdout.write(f"{kernel} {', '.join(wrong(arch, kernel))}\n")
            sys.stdout.flush()
    (folder / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), every="every" in sys.argv[3:])
