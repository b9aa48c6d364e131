"""Set-up takes minutes: it says what it does meanwhile, and what pip said when it fails."""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from ops import set_up
from ops.set_up import Progress, progress_line, stage_of


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("Collecting torch==2.13.0 (from pagemesh==0.1.0)\n", "looking up torch==2.13.0"),
        ("  Downloading torch-2.13.0-cp311.whl (180.1 MB)\n",
         "downloading torch-2.13.0-cp311.whl (180.1 MB)"),
        ("  Downloading https://host/a/b/rich-14.0.whl\n", "downloading rich-14.0.whl"),
        ("Installing collected packages: a, b, c\n", "unpacking packages (3)"),
        ("  Preparing editable metadata (pyproject.toml): started\n",
         "compiling the native library and the pager's core"),
        ("  Installing build dependencies: started\n", "preparing the build"),
        ("Requirement already satisfied: numpy\n", ""),
        ("\n", ""),
    ],
)  # fmt: skip
def test_pips_lines_become_what_is_being_done(line: str, stage: str) -> None:
    assert stage_of(line) == stage


def test_progress_tells_the_time_in_minutes() -> None:
    assert progress_line(75.9, "looking up torch") == "set-up: 1:15 looking up torch"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "shown"),
    [(io.StringIO(), "set-up: 0:00 compiling\n"), (Terminal(), "\r\033[Kset-up: 0:00 compiling")],
)
def test_progress_is_a_line_now_and_then_or_one_in_place(stream: io.StringIO, shown: str) -> None:
    with Progress(stream, period_s=0.01) as progress:
        progress.stage = "compiling"
        deadline = time.monotonic() + 10.0
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stream.getvalue().startswith(shown)
    assert not stream.isatty() or stream.getvalue().endswith("\r\033[K"), "it is wiped at the end"


def fake_python(tmp_path: Path, script: str) -> Path:
    made = tmp_path / "python"
    made.write_text(f"#!/bin/sh\n{script}\n")
    made.chmod(made.stat().st_mode | stat.S_IXUSR)
    return made


def test_a_failure_shows_what_pip_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = fake_python(tmp_path, "echo Collecting x; echo 'ERROR: no such package' >&2; exit 3")
    assert set_up._pip(python, "install", "x") == 3
    assert "ERROR: no such package" in capsys.readouterr().err


def test_pip_has_ended_when_ctrl_c_ends_set_up(tmp_path: Path) -> None:
    ready, ended = tmp_path / "ready", tmp_path / "ended"
    cleans_up = f"trap 'sleep 0.5; touch {ended}; exit 130' INT; touch {ready}"
    python = fake_python(tmp_path, f"{cleans_up}; while :; do sleep 0.05; done")
    code = (
        "import sys; from pathlib import Path; from ops import set_up\n"
        "try: set_up._pip(Path(sys.argv[1]), 'install', 'x')\n"
        "except KeyboardInterrupt: sys.exit(7)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, python], start_new_session=True)
    deadline = time.monotonic() + 20.0
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(20) == 7
    assert ended.exists()


def test_a_success_leaves_nothing_of_pips_chatter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set_up._pip(fake_python(tmp_path, "echo Collecting x"), "install", "x") == 0
    shown = capsys.readouterr()
    assert shown.err == shown.out == ""


def test_who_stops_it_is_told_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(_python: Path) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(set_up, "has_pip", stopped)
    monkeypatch.setattr(sys, "argv", ["set_up.py", "venv"])
    assert set_up.main() == 130
    assert capsys.readouterr().err.splitlines()[-1] == "set-up: stopped; start it again to go on"


def test_an_environment_that_was_left_half_made_has_no_pip(tmp_path: Path) -> None:
    assert not set_up.has_pip(tmp_path / "none")
    assert not set_up.has_pip(fake_python(tmp_path, "exit 1"))
    assert set_up.has_pip(fake_python(tmp_path, "exit 0"))


def test_a_python_that_is_too_old_gets_as_far_as_the_line_that_says_so() -> None:
    tree = ast.parse(Path(set_up.__file__).read_text(), feature_version=(3, 6))
    found = list(ast.walk(tree))
    assert not any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in found)
    functions = [node for node in found if isinstance(node, ast.FunctionDef)]
    hints = [each.annotation for node in functions for each in node.args.args]
    for hint in (*hints, *(node.returns for node in functions)):
        assert not isinstance(hint, ast.Subscript | ast.BinOp), f"line {hint.lineno}: quote it"


@pytest.mark.parametrize(
    ("module", "told"), [(None, "install the venv module"), ("there", "room on its disk")]
)
def test_a_venv_that_cannot_be_made_is_not_always_for_want_of_the_module(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    module: str | None,
    told: str,
) -> None:
    monkeypatch.setattr(set_up, "_make", lambda _venv: 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: module)
    monkeypatch.setattr(sys, "argv", ["set_up.py", str(tmp_path / "venv")])
    assert set_up.main() == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def build_native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with one source and a place for its library in ``tmp_path``."""
    spec = importlib.util.spec_from_file_location("build_native", set_up.BUILD_NATIVE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "source.cpp").touch()
    monkeypatch.setattr(module, "SOURCE_ROOT", tmp_path)
    monkeypatch.setattr(module, "LIBRARY_PATH", tmp_path / "library.so")
    monkeypatch.setattr(module, "BUILD_FOLDER", tmp_path)
    return module


def test_a_library_is_stale_until_it_is_newer_than_its_sources(build_native: ModuleType) -> None:
    library = build_native.LIBRARY_PATH
    assert build_native.is_stale()
    library.touch()
    assert not build_native.is_stale()
    os.utime(library, (0, 0))
    assert build_native.is_stale()


def test_a_library_is_as_old_as_the_build_that_ends_with_it_even_if_that_links_nothing(
    build_native: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked, source = tmp_path / build_native.LIBRARY_NAME, tmp_path / "native" / "source.cpp"
    now_s = time.time()
    linked.touch()
    os.utime(linked, (0, 0))
    os.utime(source, (now_s - 300, now_s - 300))
    monkeypatch.setattr(time, "time", lambda: now_s - 200)
    monkeypatch.setattr(build_native, "_tool", lambda *names: names[0])
    monkeypatch.setattr(build_native, "_run", lambda command: None)
    build_native.build()
    assert not build_native.is_stale()

    def changed_meanwhile(_: list[str]) -> None:
        os.utime(source, (now_s - 100, now_s - 100))

    monkeypatch.setattr(build_native, "_run", changed_meanwhile)
    build_native.build()
    assert build_native.is_stale()
