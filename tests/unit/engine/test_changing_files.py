"""A model whose files are replaced while a worker loads it is of one version, and named so."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.engine.models import SHAPE, save_twin
from transformers import LlamaConfig

from pagemesh.engine import checkpoint, fallback_loading, loading, opening
from pagemesh.engine.checkpoint import FilesChangedError
from pagemesh.engine.loading import load_model
from pagemesh.engine.opening import open_engine
from pagemesh.runtime.settings import WorkerConfig

WEIGHTS = "model.safetensors"
CHANGED = "model.layers.0.self_attn.v_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_twin(tmp_path / "model", LlamaConfig(**SHAPE, tie_word_embeddings=True))
    return tmp_path / "model"


def replace_weights(folder: Path, *, in_place: bool) -> None:
    """Put another version there, of the same size."""
    path, other = folder / WEIGHTS, folder / "other"
    tensors = load_file(path)
    tensors[CHANGED] = tensors[CHANGED] + 1
    save_file(tensors, other, metadata={"format": "pt"})
    if in_place:
        path.write_bytes(other.read_bytes())
        other.unlink()
    else:
        other.replace(path)


def once(act: Callable[[], object], then: Callable[..., Any]) -> Callable[..., Any]:
    """``then``, with ``act`` before the first time."""
    todo = [act]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if todo:
            todo.pop()()
        return then(*args, **kwargs)

    return wrapped


def config_of(folder: Path) -> WorkerConfig:
    return WorkerConfig(
        model=str(folder), model_name="m", cache_dir=str(folder.parent / "cache"), device="cpu"
    )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("step", ["weights_digest", "load_prepared"])
def test_weights_that_are_replaced_while_they_are_loaded_are_loaded_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str, in_place: bool
) -> None:
    monkeypatch.setattr(opening, "_PAUSE_S", 0.0)
    strike = once(lambda: replace_weights(folder, in_place=in_place), getattr(loading, step))
    monkeypatch.setattr(loading, step, strike)
    model = open_engine(config_of(folder)).model
    alone = load_model(folder, name="m", page_size=16, cache=folder.parent / "fresh")
    assert isinstance(model, loading.LoadedModel)
    assert model.root == alone.root
    found, wanted = model.weights.layers[0], alone.weights.layers[0]
    assert torch.equal(found.qkv.panels, wanted.qkv.panels), "one version by the other's name"


@pytest.mark.parametrize("step", ["read_config", "weights_digest"])
def test_a_configuration_that_is_replaced_while_a_model_is_loaded_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(opening, "_PAUSE_S", 0.0)
    path = folder / checkpoint.CONFIG_NAME
    before = path.read_text()

    def replace() -> None:
        path.write_text(json.dumps(json.loads(before) | {"rms_norm_eps": 0.5}))

    monkeypatch.setattr(loading, step, once(replace, getattr(loading, step)))
    model = open_engine(config_of(folder)).model
    assert isinstance(model, loading.LoadedModel) and model.config.norm_epsilon == 0.5
    path.write_text(before)
    again = load_model(folder, name="m", page_size=16, cache=folder.parent / "cache")
    assert again.config.norm_epsilon != 0.5, "it is not remembered as what the other one says"


def test_modules_have_the_configuration_that_they_are_named_by(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / checkpoint.CONFIG_NAME
    changed = json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5})
    digest = fallback_loading._config_digest
    strike = once(lambda: path.write_text(changed), digest)
    monkeypatch.setattr(fallback_loading, "_config_digest", strike)
    with pytest.raises(FilesChangedError):
        fallback_loading.load_fallback(
            folder, name="m", page_size=16, cache=folder.parent / "cache"
        )


def test_a_file_that_is_gone_when_it_is_named_was_changed(folder: Path, tmp_path: Path) -> None:
    gone = folder / WEIGHTS
    with checkpoint.Checkpoint(folder) as opened:
        gone.unlink()
        with pytest.raises(FilesChangedError, match="was changed while it was read"):
            checkpoint.weights_digest(opened.paths, b"", tmp_path)
        with pytest.raises(FilesChangedError, match="was changed while it was read"):
            opened.require_unchanged()


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json"])
def test_a_file_that_is_away_for_a_moment_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, lean: bool
) -> None:
    monkeypatch.setattr(opening, "has_lean_path", lambda _folder: lean)
    path, aside = folder / name, folder / "aside"
    steps: list[str] = []

    def back(_seconds: float) -> None:
        aside.rename(path)
        steps.append("back")

    def away() -> None:
        path.rename(aside)
        steps.append("away")

    monkeypatch.setattr(time, "sleep", back)
    if name == WEIGHTS:  # listed, and then gone when it is opened
        strike = once(away, checkpoint.Checkpoint.__enter__)
        monkeypatch.setattr(checkpoint.Checkpoint, "__enter__", lambda self: strike(self))
    elif name == "config.json":  # read, and then gone when it is digested
        module, step = (loading, "decoder_config") if lean else (fallback_loading, "_config_digest")
        monkeypatch.setattr(module, step, once(away, getattr(module, step)))
    else:
        read = Path.read_bytes
        struck = once(away, read)
        monkeypatch.setattr(
            Path, "read_bytes", lambda self: struck(self) if self == path else read(self)
        )
    assert open_engine(config_of(folder)).model.config.layer_count == 3
    assert steps == ["away", "back"]


def test_files_that_never_rest_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_PAUSE_S", 0.0)
    digest = checkpoint.weights_digest

    def strike(*args: Any) -> bytes:
        replace_weights(folder, in_place=False)
        return digest(*args)

    monkeypatch.setattr(loading, "weights_digest", strike)
    with pytest.raises(FilesChangedError, match="was changed while it was read"):
        open_engine(config_of(folder))
    assert not list((folder.parent / "cache").glob("*panels*.safetensors"))


def test_modules_are_not_kept_under_the_name_of_what_was_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = fallback_loading._write_modules
    strike = once(lambda: replace_weights(folder, in_place=False), write)
    monkeypatch.setattr(fallback_loading, "_write_modules", strike)
    cache = folder.parent / "cache"
    with pytest.raises(FilesChangedError):
        fallback_loading.load_fallback(folder, name="m", page_size=16, cache=cache)
    assert not list(cache.glob("*modules*.safetensors"))
    shutil.rmtree(cache)


def test_a_remembered_configuration_is_not_believed_once_a_digit_of_it_has_changed(
    folder: Path,
) -> None:
    cache = folder.parent / "cache"
    config = load_model(folder, name="m", page_size=16, cache=cache).config
    (memo,) = cache.glob("config-*")
    changed = memo.read_bytes().replace(b'"scale":1.0', b'"scale":1.5')
    assert changed != memo.read_bytes()
    memo.write_bytes(changed)
    assert load_model(folder, name="m", page_size=16, cache=cache).config == config
