"""Triton kernels compiled ahead of time for GPUs that are not here: what became of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kernels.compiled import PRODUCTS, SHARED_BYTES_MAX, Compiled, cases

ROOT = Path(__file__).parents[2]

# Compiling takes some minutes a target on a slow core, and the first test waits for it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="session")
def compilers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[int, tuple[Path, subprocess.Popen[bytes]]]]:
    """For each architecture its folder and the process that compiles for it, side by side."""
    running: dict[int, tuple[Path, subprocess.Popen[bytes]]] = {}
    for arch in SHARED_BYTES_MAX:
        folder = tmp_path_factory.mktemp(f"sm_{arch}")
        own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.kernels.compiled", str(arch), str(folder)],
                cwd=ROOT, env=os.environ | own, stdout=log, stderr=log,
            )  # fmt: skip
        running[arch] = folder, process
    yield running
    for _, process in running.values():
        process.kill()
        process.wait()


@pytest.fixture(scope="session", params=sorted(SHARED_BYTES_MAX), ids=lambda arch: f"sm_{arch}")
def compiled(
    request: pytest.FixtureRequest, compilers: dict[int, tuple[Path, subprocess.Popen[bytes]]]
) -> tuple[int, list[Compiled]]:
    """The architecture, and every kernel as compiled for it: once for all tests."""
    arch = request.param
    folder, process = compilers[arch]
    assert process.wait() == 0, (folder / "log").read_text()[-4000:]
    report = json.loads((folder / "report.json").read_text())
    return arch, [Compiled(**entry) for entry in report]


def test_every_launch_compiles(compiled: tuple[int, list[Compiled]]) -> None:
    assert {kernel.case for kernel in compiled[1]} == set(cases())


def test_no_kernel_spills_registers(compiled: tuple[int, list[Compiled]]) -> None:
    assert not [kernel for kernel in compiled[1] if kernel.spills]


def test_every_kernel_fits_on_a_multiprocessor(compiled: tuple[int, list[Compiled]]) -> None:
    arch, kernels = compiled
    assert not [kernel for kernel in kernels if kernel.shared_bytes > SHARED_BYTES_MAX[arch]]


def test_products_are_taken_by_matrix_instructions(compiled: tuple[int, list[Compiled]]) -> None:
    products = [kernel for kernel in compiled[1] if kernel.kernel in PRODUCTS]
    assert {kernel.kernel for kernel in products} == set(PRODUCTS)
    assert all(kernel.matrix_instructions for kernel in products)


def test_attention_loads_k_and_v_eight_elements_at_a_time(
    compiled: tuple[int, list[Compiled]],
) -> None:
    """A K that is loaded element by element was a mask or a page number that the compiler
    could not see through: eight times the instructions, and no copy ahead of time."""
    found = {kernel.case: kernel for kernel in compiled[1] if kernel.kernel == "_attend_span"}
    tile_loads = 128 * 32 // (8 * 2 * 32)  # elements of K, or of V, over those of a load
    assert found["decode, bfloat16"].wide_loads >= 2 * tile_loads
    assert found["decode, int8"].half_wide_loads >= 2 * tile_loads


def test_float32_pages_are_loaded_four_elements_at_a_time(
    compiled: tuple[int, list[Compiled]],
) -> None:
    """On sm_90 a factor that has to be turned for its instruction may be loaded word by word:
    16 times as many loads."""
    found = {kernel.case: kernel for kernel in compiled[1] if kernel.kernel in PRODUCTS}
    for queries in ("float32", "bfloat16"):
        for kind, threads in (("decode", 128), ("prefill", 128 if queries == "float32" else 256)):
            kernel = found[f"{kind}, {queries} on float32, 128 wide, groups of 4"]
            assert kernel.wide_loads >= 2 * (128 * 32) // (4 * threads)
