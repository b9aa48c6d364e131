"""A path where one may not even look is told in one line, by commands run as users run them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

_DROP_FROM_BOUND = 24
_OVERRIDES = (1, 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, without which root may look where others may."""


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    return folder


def pagemesh(*arguments: object, **environ: str) -> tuple[int, str]:
    """The exit code of a command, and what it says on both streams."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PAGEMESH_")}
    done = subprocess.run(
        [sys.executable, "-m", "pagemesh.cli", *map(str, arguments)], env=clean | environ,
        preexec_fn=_as_others, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def _as_others() -> None:
    if not os.getuid():
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        for capability in _OVERRIDES:
            if prctl(_DROP_FROM_BOUND, capability):
                raise OSError(ctypes.get_errno(), "root cannot be told no here")


@pytest.mark.parametrize("command", ["up --http :0 --model", "plan", "serve decode --model"])
def test_a_model_there_is_one_line_that_names_it(closed: Path, command: str) -> None:
    model = closed / "model"
    line = f"error: model {model}: permission denied; name another\n"
    assert pagemesh(*command.split(), model) == (2, line)
    assert pagemesh(*command.split(), closed) == (2, line.replace(str(model), str(closed)))


def test_a_pool_there_is_one_line_that_names_it(closed: Path) -> None:
    pools = closed / "pools"
    named = f"PAGEMESH_POOL_DIR={pools} (--pool-dir): cannot be written (permission denied)"
    assert pagemesh("up", "--http", ":0", "--pool-dir", pools) == (
        2, f"error: {named}; name another\n"
    )  # fmt: skip
    code, said = pagemesh("doctor", PAGEMESH_POOL_DIR=str(pools))
    assert code == 1 and f"no  pool folder    {named}" in said and "Traceback" not in said


def test_a_pager_of_its_own_has_one_line_for_it_too(closed: Path) -> None:
    environ = {"PAGEMESH_SECRET": "0123456789abcdef"}
    code, said = pagemesh("serve", "pager", "--pool-dir", closed / "pools", **environ)
    assert code == 2 and said == (
        f"pagemesh pager: PAGEMESH_POOL_DIR={closed / 'pools'}: cannot make this folder "
        "(Permission denied); name one that can be written\n"
    )
