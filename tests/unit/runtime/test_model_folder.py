"""A model's folder is found by path or hub id, and judged before gigabytes are fetched."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tests.support.model_files import write_model_files

from pagemesh.runtime.model_folder import (
    INDEX_NAME,
    find_model,
    is_hub_id,
    read_config,
    weight_files,
)
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
    assert {"model.safetensors", "*.json"} <= set(hub.fetched[-1])


def test_of_the_weights_on_the_hub_those_of_the_index_are_fetched(hub: Hub, tmp_path: Path) -> None:
    """Beside them there may be all of them once more, in one file."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (tmp_path / "snapshot").mkdir()
    index = {"weight_map": dict(zip("abcd", names * 2, strict=True))}
    (tmp_path / "snapshot" / INDEX_NAME).write_text(json.dumps(index))
    find_model("someone/tiny")
    assert [name for name in hub.fetched[-1] if name.endswith(".safetensors")] == names


def test_the_weights_of_a_model_that_is_refused_are_not_fetched(hub: Hub) -> None:
    def refuse(folder: Path) -> Any:
        assert (folder / "config.json").is_file()
        raise ConfigError(f"model {folder}: is not supported")

    with pytest.raises(ConfigError, match="is not supported"):
        find_model("someone/tiny", inspect=refuse)
    assert hub.fetched and not any("safetensors" in str(kinds) for kinds in hub.fetched)


def test_a_hub_model_that_is_not_there_is_one_sentence(hub: Hub) -> None:
    with pytest.raises(ConfigError) as caught:
        find_model("someone/else")
    assert "not to be had from the hub (404: no such repository)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_on_this_machine_is_judged_too(tmp_path: Path) -> None:
    judged: list[Path] = []
    found = find_model(str(write_model_files(tmp_path / "tiny")), inspect=judged.append)
    assert judged == [found.path]


def test_a_file_of_gguf_is_told_apart_from_one_of_a_folder_that_is_meant(tmp_path: Path) -> None:
    (tmp_path / "tiny.Q4_0.GGUF").touch()
    with pytest.raises(ConfigError, match=r"GGUF: GGUF is not read; name a Hugging Face folder"):
        find_model(str(tmp_path / "tiny.Q4_0.GGUF"))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"safetensors: is a file; name the folder it is in"):
        find_model(str(tmp_path / "model.safetensors"))


def test_a_configuration_is_read_with_numbers_that_are_python_and_no_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"limit": Infinity, "length": 1000000000000000019884624838656}')
    assert read_config(path) == {"limit": float("inf"), "length": 1000000000000000019884624838656}


@pytest.mark.parametrize("text", ["{", "[]", '{"a":' + "[" * 200_000])
def test_what_is_no_configuration_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: (cannot be read as|holds no) JSON"):
        read_config(path)


def test_the_files_of_the_weights_are_those_of_the_index_or_the_one_file(tmp_path: Path) -> None:
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {"a": "2.st", "b": "1.st", "c": "2.st"}}')
    assert weight_files(tmp_path) == [tmp_path / "1.st", tmp_path / "2.st"]


def test_an_index_of_weights_that_may_not_be_read_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / INDEX_NAME).touch()
    monkeypatch.setattr(Path, "read_text", forbidden)
    with pytest.raises(ConfigError, match=r"index\.json: cannot be read \(Permission denied\)"):
        weight_files(tmp_path)


@pytest.mark.parametrize("model", ["~nobody-here/x", "n" * 300, "n" * 300 + "/name"])
def test_a_name_that_no_path_can_have_is_one_sentence(model: str) -> None:
    with pytest.raises(ConfigError, match=f"^model {model}: .*(in full|name another)$"):
        find_model(model)


def test_a_hub_id_whose_path_may_not_be_looked_at_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="file name too long"):
        is_hub_id("n" * 300 + "/name")
    assert is_hub_id("owner/name") and not is_hub_id("~nobody-here/x")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 1}', "[" * 200_000])
def test_a_broken_index_of_weights_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(ConfigError, match="broken index"):
        weight_files(tmp_path)
