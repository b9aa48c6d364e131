"""What each thread gets of a product of many rows: all of it once, and about as much as others."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

Longest = Callable[[int, int, int, int], int]
"""Of rows, panels, threads and panels of a unit: what the thread with most has to do."""

ROWS = (3, 16, 31, 64, 100, 200, 256, 257, 300, 512, 513, 543, 1024, 2047)
PANELS = (1, 5, 20, 36, 54, 60, 96, 108)


@pytest.fixture(scope="module")
def longest(tmp_path_factory: pytest.TempPathFactory) -> Longest:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = Path(__file__).with_name("shares_probe.cpp")
    target = tmp_path_factory.mktemp("probe") / "probe.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC"]
    command = [compiler, *flags, str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = ctypes.CDLL(str(target)).probe_longest
    found.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_long]
    found.restype = ctypes.c_long
    return lambda *asked: int(found(*asked))


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 16, 64])
@pytest.mark.parametrize("unit_panels", [6, 12])
def test_every_row_of_every_panel_is_in_one_unit(
    longest: Longest, threads: int, unit_panels: int
) -> None:
    for rows, panels in product(ROWS, PANELS):
        most = longest(rows, panels, threads, unit_panels)
        assert rows * panels / threads <= most <= rows * panels, (rows, panels)


# Prompts of 512 tokens, those with tokens of answers beside them, and rows of few prompts.
@pytest.mark.parametrize("threads", [2, 4, 8])
@pytest.mark.parametrize("rows", [100, 200, 300, 512, 513, 543, 1024])
def test_no_thread_waits_long_for_the_one_with_most(
    longest: Longest, threads: int, rows: int
) -> None:
    over = {
        panels: round(most / (rows * panels / threads), 3)
        for panels in (20, 36, 54, 60, 96, 108)
        if (most := longest(rows, panels, threads, 12)) > 1.09 * rows * panels / threads
    }
    assert not over
