"""A model's folder is found by path or hub id, and judged before gigabytes are fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tests.support.model_files import write_model_files

from pagemesh.runtime.model_folder import find_model
from pagemesh.wire.errors import ConfigError


class Hub:
    """A hub with one model; ``fetched`` are the kinds of files asked for, call by call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.fetched: list[list[str]] = []

    def snapshot_download(self, model: str, *, allow_patterns: list[str]) -> str:
        if model != "someone/tiny":
            raise OSError("404: no such repository\nand a page of advice")
        self.fetched.append(allow_patterns)
        return str(write_model_files(self._folder))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    return made


def test_a_hub_model_is_fetched_whole_under_its_id(hub: Hub, tmp_path: Path) -> None:
    found = find_model("someone/tiny")
    assert (found.name, found.path) == ("someone/tiny", tmp_path / "snapshot")
    assert {"*.safetensors", "*.json"} <= set(hub.fetched[-1])


def test_the_weights_of_a_model_that_is_refused_are_not_fetched(hub: Hub) -> None:
    def refuse(folder: Path) -> Any:
        assert (folder / "config.json").is_file()
        raise ConfigError(f"model {folder}: is not supported")

    with pytest.raises(ConfigError, match="is not supported"):
        find_model("someone/tiny", inspect=refuse)
    assert not any("*.safetensors" in kinds for kinds in hub.fetched)


def test_a_hub_model_that_is_not_there_is_one_sentence(hub: Hub) -> None:
    with pytest.raises(ConfigError) as caught:
        find_model("someone/else")
    assert "not to be had from the hub (404: no such repository)" in str(caught.value)
    assert "\n" not in str(caught.value)
