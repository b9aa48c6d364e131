"""Kernels keep within their memory: their own tests again, by a library that watches every access.

The library is built with AddressSanitizer, whose runtime has to be in the process first. With
``PAGEMESH_LONG=1`` alone: it takes tens of minutes of a core.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.machine.examples import IS_LONG

REPOSITORY = Path(__file__).parents[2]
TESTS = (
    "kernels/test_draw_limits.py", "kernels/test_edit_rows.py", "kernels/test_int8_weights.py",
    "kernels/test_kv_dtypes.py", "kernels/test_linear.py", "kernels/test_paged.py",
    "kernels/test_rounded_rows.py", "kernels/test_row_operations.py",
    "kernels/test_slim_weights.py", "kernels/test_softmax_draw.py", "kernels/test_top_scores.py",
    "kernels/test_windows.py", "unit/engine/test_step.py", "unit/engine/test_run_ahead.py",
    "unit/engine/test_drafts.py", "unit/engine/test_rounded_weights.py",
)  # fmt: skip
CHOSEN = "not architecture"
"""Those of every architecture take minutes, and the products and rows that the others do."""
BUILD_S_MAX, RUN_S_MAX = 1_200, 2_400


def runtime() -> str:
    """What is to be loaded first; empty: there is no such compiler here."""
    if shutil.which("g++") is None:
        return ""
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        asked = subprocess.run(
            ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
        found.append(Path(asked.stdout.strip()))
    return ":".join(map(str, found)) if all(path.is_absolute() for path in found) else ""


def built_in(folder: Path) -> Path:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert cmake is not None
    flags = "-fsanitize=address -fno-omit-frame-pointer -g"
    source = ["-S", str(REPOSITORY / "kernels" / "native"), "-B", str(folder)]
    compiler = ["-DCMAKE_CXX_COMPILER=g++", f"-DCMAKE_CXX_FLAGS={flags}"]
    for command in (
        [cmake, *source, *compiler],
        [cmake, "--build", str(folder), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S_MAX)
        assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    return folder / "libpagemesh_native.so"


@pytest.mark.skipif(not IS_LONG, reason="takes minutes")
@pytest.mark.timeout(BUILD_S_MAX + RUN_S_MAX)
def test_no_kernel_reads_or_writes_beyond_what_it_was_given(tmp_path: Path) -> None:
    loaded_first = runtime()
    if not loaded_first:
        pytest.skip("there is no g++ with AddressSanitizer")
    environment = os.environ | {
        "PAGEMESH_TEST_LIBRARY": str(built_in(tmp_path / "build")),
        "LD_PRELOAD": loaded_first,
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={tmp_path / 'found'}",
        "PYTHONMALLOC": "malloc",
    }
    paths = [str(REPOSITORY / "tests" / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.support.sanitized"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-k", CHOSEN, *paths], cwd=REPOSITORY, env=environment,
        capture_output=True, text=True, timeout=RUN_S_MAX,
    )  # fmt: skip
    found = [path.read_text()[:4_000] for path in sorted(tmp_path.glob("found*"))]
    assert done.returncode == 0 and not found, "\n".join([*found, done.stdout[-2_000:]])
