"""What a benchmark says it ran on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from ops.bench import hardware

SCRIPT = "ops/bench/bench.py"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, in which the benchmarks seem to be."""
    script = tmp_path / SCRIPT
    script.parent.mkdir(parents=True)
    script.write_text("first\n")
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first"],
    ):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    monkeypatch.setattr(hardware, "__file__", str(script))
    return tmp_path


def test_the_commit_of_a_clean_tree_has_no_mark(checkout: Path) -> None:
    commit = hardware.describe()["commit"]
    assert isinstance(commit, str)
    assert len(commit) == 12


def test_a_tree_that_differs_from_its_commit_is_marked(checkout: Path) -> None:
    (checkout / SCRIPT).write_text("second\n")
    assert str(hardware.describe()["commit"]).endswith("+")


def test_reports_that_other_benchmarks_wrote_are_no_difference(checkout: Path) -> None:
    for name in ("results/one.json", "bench.py"):
        path = checkout / "ops/bench" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("more\n")
        subprocess.run(["git", "add", "-N", str(path)], cwd=checkout, check=True)
        marked = str(hardware.describe()["commit"]).endswith("+")
        assert marked is (name == "bench.py")


def test_without_a_repository_the_commit_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "__file__", str(tmp_path / "bench.py"))
    assert hardware.describe()["commit"] == "unknown"
