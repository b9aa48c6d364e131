"""Workers go on where the folder that they were started in is gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagemesh.cli.serve import leave_lost_folder


def test_a_worker_leaves_a_working_folder_that_was_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lost"
    folder.mkdir()
    monkeypatch.chdir(folder)
    leave_lost_folder()
    assert Path.cwd() == folder
    folder.rmdir()
    leave_lost_folder()
    assert os.getcwd() == "/"
