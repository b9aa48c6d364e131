"""The tests of the pager's core once more, on the compiled one that users run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pagemesh.pager
from pagemesh.runtime.compiled import VARIABLE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", ["tests/unit/pager", "tests/machine"])
def test_the_compiled_core_does_what_its_sources_do(folder: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    is_compiled = subprocess.run(
        [sys.executable, "-c", "import pagemesh.pager as p; raise SystemExit(not p.IS_COMPILED)"],
        env=environ, cwd=ROOT, check=False,
    )  # fmt: skip
    if is_compiled.returncode and not os.environ.get("CI"):
        pytest.skip("sources were edited since (python services/compile_cores.py)")
    assert not is_compiled.returncode, "nothing was compiled"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder],
        env={**environ, VARIABLE: "1"}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not pagemesh.pager.IS_COMPILED
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-2_000:]
