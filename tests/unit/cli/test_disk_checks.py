"""A folder for pages on disk is checked before anything starts."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from tests.support.model_files import write_model_files
from tests.unit.cli.test_start_checks import Usage, pool_folder, torch_of_a_cpu, up_error

from pagemesh.cli.mesh.screen import Screen
from pagemesh.cli.mesh.start_checks import check_disk, disk_shortfall
from pagemesh.cli.up import plan
from pagemesh.pager.storage.disk_file import DiskPlace
from pagemesh.pager.storage.plain_file import PlainFile

__all__ = ["pool_folder", "torch_of_a_cpu"]


def test_a_folder_for_pages_on_disk_that_cannot_be_one_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_disk(tmp_path, "h")
    check_disk(tmp_path / "not" / "there" / "yet", "h")
    assert list(tmp_path.iterdir()) == [], "nothing was made"
    file = tmp_path / "file"
    file.touch()
    line = up_error(capsys, "--disk-dir", str(file))
    assert f"PAGEMESH_DISK_DIR={file} (--disk-dir): not a folder; name another" in line
    assert f"{file} is not a folder" in up_error(capsys, "--disk-dir", str(file / "below"))
    # Where root may write as well as anybody, and nobody can.
    assert "/proc cannot be written" in up_error(capsys, "--disk-dir", "/proc/pages")

    def cannot(**_: object) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "mkdtemp", cannot)
    number = errno.EROFS
    line = up_error(capsys, "--disk-dir", str(tmp_path))
    assert "(--disk-dir): cannot be written (read-only file system); name another" in line
    number = errno.ENOSPC
    check_disk(tmp_path, "h")


def test_a_folder_for_pages_on_disk_that_another_mesh_uses_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = DiskPlace(tmp_path, "h", 1 << 20, b"secret")
    with contextlib.closing(PlainFile(place.path("index"))):
        line = up_error(capsys, "--disk-dir", str(tmp_path), "--host", "h")
        assert "another mesh keeps its pages there" in line
        check_disk(tmp_path, "other")
    check_disk(tmp_path, "h")


def test_a_disk_smaller_than_its_tier_may_become_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(9, 9, 1 << 40))
    model, disk = write_model_files(tmp_path / "tiny"), tmp_path / "disk"
    flags = {"PAGEMESH_MODEL": str(model), "PAGEMESH_HTTP": ":0", "PAGEMESH_DISK_DIR": str(disk)}
    plan(dict(os.environ), flags | {"PAGEMESH_DISK_BYTES": "1TiB"}, Screen())
    assert capsys.readouterr().err == ""
    plan(dict(os.environ), flags | {"PAGEMESH_DISK_BYTES": "2TiB"}, Screen())
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"disk: {disk} has 1 TiB for pages, fewer than --disk-bytes (2 TiB)")
    disk.mkdir()
    DiskPlace(disk, "h", 0, b"").path("pages").write_bytes(bytes(1 << 20))
    assert disk_shortfall(disk, "h", (1 << 40) + (1 << 20)) == "", "what it has is its own"
