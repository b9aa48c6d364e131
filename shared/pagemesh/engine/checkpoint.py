"""A checkpoint on disk: finding it, reading its tensors, naming its content by digest.

Only safetensors are read: they are mapped, not loaded, and hold nothing but numbers.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from pagemesh.engine.files import remember
from pagemesh.runtime.model_folder import weight_files
from pagemesh.wire.errors import ConfigError, first_line

_TOKENIZER_NAMES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
CONFIG_NAME = "config.json"
_CODED = re.compile("F[468]_|F4$|[IU][0-9]+$")
"""Types as safetensors names them: small floats, which need a scale, and integers."""
_BUFFER_ENDINGS = ("bias", "mask", "position_ids")
"""Tensors of integers that older checkpoints have beside their weights, such as causal masks."""
_CHUNK_BYTES = 1 << 22
_SETTLED_NS = 2_000_000_000
"""A file that changed this recently may change again within the same tick of its time stamp, so its
digest is not cached yet."""

Version = tuple[int, ...]
"""A file's version: changes when the file is written to."""

Progress = Callable[[str, int, int], None]
"""Called with the name of the stage, the amount done and the total: in bytes, or in tensors when
weights are loaded onto a device."""


def silent(_stage: str, _done_bytes: int, _total_bytes: int) -> None:
    """A ``Progress`` that shows nothing."""


def read_config(folder: Path) -> Any:
    """The ``transformers`` configuration in ``folder``. Raises ``ConfigError``."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # unknown model types and broken JSON alike
        raise ConfigError(
            f"model {folder}: config.json cannot be used: {first_line(error)}"
        ) from None


class FilesChangedError(ConfigError):
    """A model's files changed while they were read, so what was read may mix two versions, or be
    one version under the digest of another. Read them again."""


class Checkpoint:
    """The tensors of one checkpoint by name. A context manager; tensors outlive it."""

    def __init__(self, folder: Path, described: Version = ()) -> None:
        """``described``: the version of the configuration, taken before it was read. Raises
        ``ConfigError`` when there are no safetensors files or a file is broken."""
        self.folder = folder
        self.paths = _weight_paths(folder)
        self._versions = {path: _version(path) for path in self.paths}
        if described:
            self._versions[folder / CONFIG_NAME] = described
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._names: dict[str, str] = {}

    def __enter__(self) -> Self:
        from safetensors import safe_open

        for path in self.paths:
            try:
                file = self._stack.enter_context(safe_open(str(path), framework="pt"))
            except FileNotFoundError:  # it existed when it was listed
                self._stack.close()
                raise changed(path) from None
            except Exception as error:  # safetensors has its own, untyped, exception
                self._stack.close()
                raise ConfigError(f"model {path}: broken safetensors file: {error}") from None
            self._files.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def share(self, stored: str, name: str) -> None:
        """Make the tensor that is stored as ``stored`` available as ``name`` too."""
        self._names[name] = stored
        self._files[name] = self._files[stored]

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A read-only tensor, mapped. Raises ``ConfigError`` when it is missing, has another shape,
        or is not float32, float16 or bfloat16."""
        if name not in self._files:
            raise ConfigError(f"model {self.folder}: tensor {name} is missing")
        tensor: torch.Tensor = self._files[name].get_tensor(self._names.get(name, name))
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"model {self.folder}: tensor {name} has shape {list(tensor.shape)}, "
                f"config.json wants {list(shape)}"
            )
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ConfigError(
                f"model {self.folder}: tensor {name} is {tensor.dtype}; "
                "float32, float16 and bfloat16 are supported"
            )
        return tensor

    def refuse_codes(self) -> None:
        """Raises ``ConfigError`` for a quantised checkpoint. Needed where a library reads the
        tensors, since it may take codes for weights and ignore their scales."""
        for name, file in self._files.items():
            part = file.get_slice(self._names.get(name, name))
            if not _CODED.match(kind := part.get_dtype()):
                continue
            matrix = len(part.get_shape()) > 1 and not name.endswith(_BUFFER_ENDINGS)
            if kind.startswith("F") or matrix or name.endswith("weight"):
                raise ConfigError(
                    f"model {self.folder}: tensor {name} is {kind}: quantised checkpoints are not "
                    "supported; use the float32, float16 or bfloat16 one"
                )

    def require_unchanged(self) -> None:
        """Raises ``FilesChangedError`` unless all files are as they were when this was opened, so
        that what was read from them by path is what is mapped."""
        for path, version in self._versions.items():
            if _version(path) != version:
                raise changed(path)


def config_version(folder: Path) -> Version:
    """``described`` of a ``Checkpoint``; empty when there is no configuration."""
    path = folder / CONFIG_NAME
    return _version(path) if path.is_file() else ()


def _version(path: Path) -> Version:
    """Changes when the file is replaced or written to. The modification time alone is not enough:
    rsync or cp -p may give it to other weights of the same size. The change time (ctime) is set by
    the kernel alone. Raises ``FilesChangedError`` when the file is gone."""
    try:
        facts = path.stat()
    except FileNotFoundError:
        raise changed(path) from None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def changed(path: Path) -> FilesChangedError:
    """The error for a model file that changed while it was read."""
    return FilesChangedError(
        f"model {path}: was changed while it was read; wait until it is complete, then start again"
    )


def _weight_paths(folder: Path) -> list[Path]:
    paths = weight_files(folder)
    for path in paths:
        if not path.is_file():
            raise ConfigError(
                f"model {folder}: {path.name} is missing; the weights must be safetensors files"
            )
    return paths


def weights_digest(
    paths: Iterable[Path], config_digest: bytes, cache: Path, progress: Progress = silent
) -> bytes:
    """SHA-256 over the content of ``paths`` and the digest of the configuration that interprets it.

    Reading tens of gigabytes takes a minute, so each file's digest is kept in ``cache`` under its
    path, inode, size and times. Raises ``FilesChangedError`` when a file has disappeared.
    """
    sizes = {path: _size(path) for path in paths}
    total = sum(sizes.values())
    digest = hashlib.sha256(config_digest)
    done = 0
    for path, size in sizes.items():
        digest.update(_file_digest(path, cache, partial(_report, progress, done, total)))
        done += size
    progress("digest", total, total)
    return digest.digest()


def tokenizer_digest(folder: Path) -> bytes:
    """SHA-256 over the names and content of the tokenizer's files. Raises ``FilesChangedError``
    when one disappears before it is read."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_NAMES:
        path = folder / name
        if path.is_file():
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                raise changed(path) from None
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.digest()


def _size(path: Path) -> int:
    return _version(path)[1]


def _report(progress: Progress, before: int, total: int, count: int) -> None:
    progress("digest", before + count, total)


def _file_digest(path: Path, cache: Path, report: Callable[[int], None]) -> bytes:
    *version, changed_ns = _version(path)
    key = " ".join(map(str, (path.resolve(), *version, changed_ns)))
    known = cache / f"digest-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    try:
        remembered = bytes.fromhex(known.read_text())
        if len(remembered) == 32:
            return remembered
    except (OSError, ValueError):
        pass  # not known yet, or a file torn at an earlier time: read it again
    digest, done = hashlib.sha256(), 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise changed(path) from None
    with file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report(done)
    if time.time_ns() - changed_ns > _SETTLED_NS:
        remember(known, digest.hexdigest().encode())
    return digest.digest()
