"""What each thread gets of a product of many rows: all of it once, and about as much as others."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from tests.kernels.levels import LEVELS

from pagemesh.kernels.native.library import CpuLevel

Longest = Callable[..., int]
"""Of rows, panels, threads and panels of a unit: what the thread with most has to do, with
``as_large`` of units as large as can be."""

FLAGS = {
    CpuLevel.PORTABLE: (),
    CpuLevel.AVX2: ("-mavx2", "-mfma", "-mf16c"),
    CpuLevel.AVX512: ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
}
ROWS = (31, 64, 100, 113, 200, 256, 257, 300, 512, 513, 521, 543, 1024, 2047)
PANELS = (1, 5, 16, 20, 36, 54, 56, 60, 73, 96, 108, 128)


@pytest.fixture(scope="module", params=[level for level in FLAGS if level in LEVELS])
def longest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Longest:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = Path(__file__).with_name("shares_probe.cpp")
    target = tmp_path_factory.mktemp("probe") / "probe.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-DPM_LEVEL={int(request.param)}"]
    command = [compiler, *flags, *FLAGS[request.param], str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = ctypes.CDLL(str(target)).probe_longest
    longs, ints = [ctypes.c_long] * 2, [ctypes.c_int]
    found.argtypes = [*longs, *ints, ctypes.c_long, *ints]
    found.restype = ctypes.c_long
    return lambda *asked, as_large=False: int(found(*asked, as_large))


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 16, 64])
@pytest.mark.parametrize("unit_panels", [6, 12])
def test_every_row_of_every_panel_is_in_one_unit_and_no_thread_has_more_than_before(
    longest: Longest, threads: int, unit_panels: int
) -> None:
    for rows, panels in product(ROWS, PANELS):
        most = longest(rows, panels, threads, unit_panels)
        assert most >= rows * panels / threads, (rows, panels)
        before = longest(rows, panels, threads, unit_panels, as_large=True)
        # The last block of rows may be shorter than the others, which nobody counts on.
        assert most <= 1.05 * before, (rows, panels)


# Prompts of 512 tokens, those with tokens of answers beside them, and rows of few prompts. To read
# weights in each block of rows takes up to an eighth.
@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("rows", [200, 300, 512, 513, 543, 1024])
def test_no_thread_waits_long_for_the_one_with_most(
    longest: Longest, threads: int, rows: int
) -> None:
    over = {
        panels: round(most / (rows * panels / threads), 3)
        for panels in (36, 54, 60, 96, 108, 128)
        if (most := longest(rows, panels, threads, 12)) > 1.125 * rows * panels / threads
    }
    assert not over


def test_one_thread_gains_nothing_by_smaller_units(longest: Longest) -> None:
    for rows, panels in product(ROWS, PANELS):
        assert longest(rows, panels, 1, 12) == longest(rows, panels, 1, 12, as_large=True)
