"""Which modules run compiled, and that who edits one runs what was edited."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagemesh.runtime.compiled import FOLDER, STAMP, SUFFIX, VARIABLE, prefer_compiled, stamp_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One module, which was compiled: for whoever looks, as it is never loaded."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    package = tmp_path / "parcel"
    (package / FOLDER).mkdir(parents=True)
    (package / "core.py").write_text("SIZE = 1\n")
    (package / FOLDER / f"parcel.core{SUFFIX}").write_bytes(b"")
    (package / FOLDER / STAMP).write_text(f"{stamp_of([package])} how parcel.core{SUFFIX}")
    return package


def test_what_was_made_from_these_sources_is_found_and_nothing_else(package: Path) -> None:
    before = list(sys.meta_path)
    assert prefer_compiled(package, [])
    [finder] = [one for one in sys.meta_path if one not in before]
    spec = finder.find_spec("parcel.core", None)
    assert spec is not None and spec.origin == str(package / FOLDER / f"parcel.core{SUFFIX}")
    assert finder.find_spec("parcel.other", None) is None
    assert finder.find_spec("core", None) is None


@pytest.mark.parametrize(
    "change",
    ["edited", "added", "renamed", "gone", "used", "no stamp", "empty stamp", "no file", "off"],
)
def test_the_sources_run_when_they_are_others_or_wanted(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    used = tmp_path / "used"
    used.mkdir()
    match change:
        case "edited":
            (package / "core.py").write_text("SIZE = 2\n")
        case "added":
            (package / "more.py").write_text("")
        case "renamed":
            (package / "core.py").rename(package / "cores.py")
        case "gone":
            (package / "core.py").unlink()
        case "used":
            (used / "types.py").write_text("")
        case "no stamp":
            (package / FOLDER / STAMP).unlink()
        case "empty stamp":
            (package / FOLDER / STAMP).write_text("")
        case "no file":
            (package / FOLDER / f"parcel.core{SUFFIX}").unlink()
        case "off":
            monkeypatch.setenv(VARIABLE, "0")
    before = list(sys.meta_path)
    assert not prefer_compiled(package, [used])
    assert sys.meta_path == before


def test_the_same_text_elsewhere_has_the_same_stamp(package: Path, tmp_path: Path) -> None:
    moved = package.rename(tmp_path / "elsewhere")
    assert (moved / FOLDER / STAMP).read_text().split()[0] == stamp_of([moved])
    assert stamp_of([moved]) != stamp_of([moved, moved])


@pytest.mark.parametrize("wanted", ["", "0"])
def test_a_service_runs_its_core_compiled_unless_told_otherwise(wanted: str) -> None:
    told = (
        "import pagemesh.pager as pager, pagemesh.pager.state as state\n"
        "print(pager.IS_COMPILED, state.__spec__.origin)"
    )
    found = subprocess.run(
        [sys.executable, "-c", told], env={**os.environ, VARIABLE: wanted},
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    if wanted == "0" or not _is_fresh():
        assert found[0] == "False" and found[1].endswith("pager/state.py")
    else:
        assert found[0] == "True" and found[1].endswith(SUFFIX)


def test_what_was_installed_is_compiled() -> None:
    if not os.environ.get("CI") and not _is_fresh():
        pytest.skip("sources were edited since (python services/compile_cores.py)")
    assert _is_fresh()


def _is_fresh() -> bool:
    pager = ROOT / "services" / "pagemesh" / "pager"
    stamp = pager / FOLDER / STAMP
    wire = ROOT / "shared" / "pagemesh" / "wire"
    return stamp.exists() and stamp.read_text().split()[0] == stamp_of([pager, wire])
