"""Finding a model's folder: the bundled demo model, a local folder or a hub id."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pagemesh.runtime.user_paths import expanded, naming
from pagemesh.wire.errors import ConfigError, first_line

CONFIG_BYTES_MAX = 16 << 20
_INDEXED_BYTES_MAX = 1 << 60
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DEMO_NAME = "pagemesh-demo"
_PACKAGED = "demo_model"
_HUB_DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """``path`` is a local folder; ``name`` is what clients call the model."""

    path: Path
    name: str


def find_model(model: str, *, inspect: Callable[[Path], object] | None = None) -> ModelFolder:
    """The folder of ``model``; empty text means the bundled demo model. A hub id is
    downloaded once. ``inspect`` may refuse the folder; for a hub id it is called before the
    weights, gigabytes, are downloaded. Raises ``ConfigError`` when nothing has that name."""
    found = find_description(model)
    if inspect is not None:
        inspect(found.path)
    if _on_this_machine(model) is not None:
        return found
    # By name: a repository may hold the weights twice, in another format or as a single file.
    weights = (str(path.relative_to(found.path)) for path in weight_files(found.path))
    return ModelFolder(_download(model, (*_HUB_DESCRIPTION, *weights)), model)


def find_description(model: str) -> ModelFolder:
    """Like ``find_model``, but the weights of a hub id are there only if they were fetched before.
    Raises ``ConfigError``."""
    return _on_this_machine(model) or ModelFolder(_download(model, _HUB_DESCRIPTION), model)


def _on_this_machine(model: str) -> ModelFolder | None:
    """None: ``model`` is a hub id."""
    if not model:
        return ModelFolder(_demo_folder(), DEMO_NAME)
    named = f"model {model}"
    folder = expanded(model, named)
    with naming(named):
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise ConfigError(f"{named}: has no config.json; name a Hugging Face folder")
            return ModelFolder(folder.resolve(), folder.resolve().name)
        if folder.exists():
            if folder.suffix.lower() == ".gguf":
                raise ConfigError(
                    f"{named}: GGUF is not read; name a Hugging Face folder with safetensors"
                )
            raise ConfigError(f"{named}: is a file; name the folder it is in")
    if not is_hub_id(model):
        raise ConfigError(f"model {model}: no such folder, and no hub id like owner/name")
    return None


def read_config(path: Path) -> dict[str, Any]:
    """A model's configuration, as it stands in the file. Raises ``ConfigError``."""
    try:
        with path.open("rb") as file:  # a pipe's size is known only by reading it
            content = file.read(CONFIG_BYTES_MAX + 1)
        if len(content) > CONFIG_BYTES_MAX:
            raise ConfigError(f"model {path}: is far too large to be a configuration")
        config: Any = json.loads(content)  # transformers writes Infinity too
    except OSError as error:
        raise ConfigError(f"model {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model {path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model {path}: holds no JSON object")
    return config


def tokenizer_file(folder: Path) -> Path:
    """The tokenizer of the model in ``folder``. Raises ``ConfigError``."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json; save the tokenizer as a fast one there")
    return path


def weight_files(folder: Path) -> list[Path]:
    """The files of the model's weights, whether they exist or not. A single file takes precedence
    over an index, which an earlier version in the same folder may have left. Raises
    ``ConfigError`` for an index that is broken or cannot be read."""
    single = folder / SINGLE_NAME
    index = _index(folder)
    if index is None:
        return [single]
    try:
        names = sorted(set(map(str, index["weight_map"].values())))
    except (KeyError, AttributeError) as error:
        raise ConfigError(f"model {folder / INDEX_NAME}: broken index: {error}") from None
    return [folder / name for name in names]


def indexed_bytes(folder: Path) -> int:
    """What all tensors take as stored, as the index says; 0 if it does not, or if there is none.
    Raises ``ConfigError`` like ``weight_files``."""
    try:
        said = (_index(folder) or {})["metadata"]["total_size"]
    except (KeyError, TypeError):
        return 0
    # Some tools write a float.
    return int(said) if isinstance(said, int | float) and 0 < said <= _INDEXED_BYTES_MAX else 0


def _index(folder: Path) -> dict[str, Any] | None:
    """The index of ``folder``; None if there is none, or a single file beside it."""
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    try:
        if single.is_file() or not index.is_file():
            return None
        found: Any = json.loads(index.read_text())
    except OSError as error:
        raise ConfigError(f"model {index}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model {index}: broken index: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"model {index}: broken index: holds no JSON object")
    return found


def is_hub_id(model: str) -> bool:
    """Whether ``model`` has the form owner/name and no such path exists. Raises ``ConfigError``
    when that cannot be determined."""
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        return False
    with naming(f"model {model}"):
        return not Path(model).exists()


def _demo_folder() -> Path:
    """In a checkout, or in an installed wheel."""
    checkout = Path(__file__).resolve().parents[3] / "ops" / "demo_model" / "weights"
    packaged = Path(str(resources.files("pagemesh.runtime"))) / _PACKAGED
    for folder in (checkout, packaged):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(
        "the bundled demo model is not here; train it with ops/demo_model/train.py, "
        "or name a model with --model FOLDER"
    )


def _download(model: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise ConfigError(
            f"model {model}: no such folder, and not to be had from the hub ({first_line(error)})"
        ) from None
