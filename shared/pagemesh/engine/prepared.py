"""Prepared weights: one file per model, mapped by every process of the host.

A checkpoint in half precision has to be converted for a CPU, and matrices have to be packed into
the layout that kernels read. If every process did that for itself, each would hold its own copy.
So the first one writes the result to a file, under a lock, and all map it: the host's page cache
holds it once. Tensors that the checkpoint already stores as needed (float32, not packed) are mapped
from the checkpoint and not written again; nor are the lean path's embeddings in half precision.

Matrices are packed here, once. Unless another type was asked for, they keep the checkpoint's half
precision, with the same results as in float32. bfloat16 may be packed into twelve bits. Everything
else is float32.

The file is in safetensors format, written tensor by tensor so that no more than one is in
memory. Its name is the digest of what it holds: it is never changed, only made or deleted.

The cache is bounded: before another file is written, all but the ``PREPARED_COUNT_MAX - 1`` most
recently loaded ones are deleted. A process that has mapped a deleted file keeps it; the next start
prepares it again. The rest of the cache (digests, configurations, locks) is under 1 KB per model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import torch

from pagemesh.engine.checkpoint import Checkpoint, Progress
from pagemesh.engine.files import locked
from pagemesh.engine.weights import Recipe, joined
from pagemesh.kernels.linear import slim
from pagemesh.kernels.linear.packed import exact_type
from pagemesh.kernels.native.locks import try_lock
from pagemesh.kernels.ops import pack_linear
from pagemesh.kernels.weight_types import AskedType, WeightType, rounds_rows
from pagemesh.wire.errors import ConfigError

_FORMATS: dict[AskedType, str] = {
    "float32": "exact-panels16-1", "int8": "i8-panels16-2", "bfloat16": "bf16-panels16-1",
}  # fmt: skip
"""Part of the file's name: weights prepared in another way go into another file."""
_SLIM_FORMAT = "slim-panels16-2"
"""Replaces all but that of ``int8`` on machines that multiply faster with slim weights."""
_STORED: dict[WeightType, tuple[str, int]] = {
    "float32": ("F32", 4), "int8": ("I8", 1), "bfloat16": ("BF16", 2), "float16": ("F16", 2),
    "slim_bfloat16": ("U8", 1),
}  # fmt: skip
"""A type's name in a safetensors file, and the bytes of an element."""
PREPARED_COUNT_MAX = 4
"""Files kept, each up to as large as its model in float32."""
_NAMES = "[0-9a-f]" * 32 + ".*-panels*"
"""Matches prepared files of any format and nothing else: users may choose any folder as cache."""
_ALIGN_BYTES = 64
_SPARE_BYTES = 64 << 20


def load_prepared(
    checkpoint: Checkpoint,
    recipes: Iterable[Recipe],
    digest: bytes,
    cache: Path,
    progress: Progress,
    weight_type: AskedType = "float32",
) -> dict[str, torch.Tensor]:
    """Every tensor of ``recipes`` by name, matrices as panels of ``weight_type``; read-only. They
    are mapped from ``checkpoint`` (an open one) or from the prepared file in ``cache``, which is
    made if it does not exist. ``digest``: see ``kept_digest``.

    Raises ``ConfigError`` when a tensor is missing or broken, or the disk is full, and
    ``FilesChangedError``.
    """
    tensors: dict[str, torch.Tensor] = {}
    wanted = []
    for recipe in recipes:
        parts = _parts(checkpoint, recipe)
        if recipe.is_as_stored(parts):
            tensors[recipe.name] = parts[0]
        else:
            wanted.append(recipe)

    def write(path: Path) -> None:
        _write(path, checkpoint, wanted, progress, weight_type)
        checkpoint.require_unchanged()  # else this name would hold other weights for good

    return tensors | load_or_write(prepared_name(digest, weight_type), cache, write)


def kept_digest(digest: bytes, weight_type: AskedType) -> bytes:
    """The digest of weights that were ``digest`` in the checkpoint and are kept as ``weight_type``.
    It goes into the model's root, since K and V depend on how weights are kept."""
    if weight_type == "float32":
        return digest
    how = "symmetric, a scale an output, 1" if weight_type == "int8" else "to the nearest"
    rows = "bfloat16 rows" if rounds_rows(weight_type) else "float32 rows"
    return hashlib.sha256(digest + f"{weight_type} {how}, {rows}".encode()).digest()


def kept_type(parts: Iterable[torch.Tensor], weight_type: AskedType) -> WeightType:
    """How a matrix made of ``parts`` is kept when ``weight_type`` was asked for."""
    if weight_type == "int8":
        return weight_type
    found = list(parts)
    kept = exact_type(*found) if weight_type == "float32" else weight_type
    if kept != "bfloat16" or not slim.pays():
        return kept
    return "slim_bfloat16" if slim.fits(joined(found)) else kept


def prepared_name(digest: bytes, weight_type: AskedType, made_by: str = "") -> str:
    """The name of a prepared file; ``made_by`` tells apart files of the same digest."""
    form = _SLIM_FORMAT if weight_type != "int8" and slim.pays() else _FORMATS[weight_type]
    return f"{digest.hex()[:32]}.{made_by}{form}"


def load_or_write(name: str, cache: Path, write: Callable[[Path], None]) -> dict[str, torch.Tensor]:
    """Every tensor of the prepared file ``name`` in ``cache``, mapped. If the file is missing or
    broken, ``write`` is called with the path to create, by one process of the host at a time; the
    file gets its name only once it is complete.

    Raises ``ConfigError`` like ``write``, and when the disk is full.
    """
    path = cache / f"{name}.safetensors"
    with locked(path.with_suffix(".lock")):
        tensors = None
        if path.is_file():
            with contextlib.suppress(ConfigError):  # a power loss may have truncated it
                tensors = _map(path)
        if tensors is None:
            _make_room(cache)
            _write_whole(path, write)
            tensors = _map(path)
        with contextlib.suppress(OSError):  # another user's file, whose times we may not set
            os.utime(path)  # the least recently loaded file is deleted first
    return tensors


def _make_room(cache: Path) -> None:
    """Delete the least recently loaded files, and what killed processes left half written."""
    whole = sorted(cache.glob(f"{_NAMES}.safetensors"), key=_loaded_ns, reverse=True)
    for path in [*whole[PREPARED_COUNT_MAX - 1 :], *cache.glob(f"{_NAMES}.partial")]:
        with contextlib.suppress(OSError), path.with_suffix(".lock").open("a") as lock:
            if try_lock(lock.fileno()):  # else a process is loading or writing it
                path.unlink(missing_ok=True)


def _loaded_ns(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


def _map(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except Exception as error:  # safetensors has its own, untyped, exception
        raise ConfigError(f"{path}: broken prepared weights ({error}); delete the file") from None


def _write_whole(path: Path, write: Callable[[Path], None]) -> None:
    from safetensors import SafetensorError

    partial = path.with_suffix(".partial")  # under the lock, so the name is ours alone
    try:
        write(partial)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: cannot write prepared weights: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


def _write(
    path: Path,
    checkpoint: Checkpoint,
    recipes: list[Recipe],
    progress: Progress,
    weight_type: AskedType,
) -> None:
    types = [_type_of(checkpoint, recipe, weight_type) for recipe in recipes]
    header, total = _header(recipes, types)
    check_room(path.parent, total)
    with path.open("wb") as file:
        file.write(header)
        done = 0
        for recipe, own in zip(recipes, types, strict=True):
            done += _write_tensor(file, _prepare(checkpoint, recipe, own))
            progress("prepare", done, total)


def check_room(folder: Path, wanted_bytes: int) -> None:
    """Raises ``ConfigError`` when ``folder`` lacks room for prepared weights of that size."""
    free = shutil.disk_usage(folder).free
    if free < wanted_bytes + _SPARE_BYTES:
        raise ConfigError(
            f"{folder}: {wanted_bytes:,} bytes are needed for prepared weights, {free:,} are free; "
            "free some there, or set PAGEMESH_CACHE_DIR to a folder on a larger disk (containers: "
            "mount a larger volume there)"
        )


def _type_of(checkpoint: Checkpoint, recipe: Recipe, weight_type: AskedType) -> WeightType:
    if not recipe.matrix:
        return "float32"
    if recipe.factor != 1.0:
        return weight_type
    return kept_type(_parts(checkpoint, recipe), weight_type)


def _parts(checkpoint: Checkpoint, recipe: Recipe) -> list[torch.Tensor]:
    return [checkpoint.tensor(name, shape) for name, shape in recipe.parts]


def _prepare(checkpoint: Checkpoint, recipe: Recipe, weight_type: WeightType) -> torch.Tensor:
    whole = recipe.join([part.to(torch.float32) for part in _parts(checkpoint, recipe)])
    if not recipe.matrix:
        return whole.contiguous()
    return pack_linear(whole, weight_type=weight_type).panels


def _write_tensor(file: IO[bytes], tensor: torch.Tensor) -> int:
    return file.write(tensor.view(torch.uint8).numpy().data.cast("B"))


def _header(recipes: list[Recipe], types: list[WeightType]) -> tuple[bytes, int]:
    """The safetensors header, padded so that data starts aligned, and the data's size."""
    entries: dict[str, object] = {}
    offset = 0
    for recipe, weight_type in zip(recipes, types, strict=True):
        shape = recipe.prepared_shape(weight_type)
        dtype, item_bytes = _STORED[weight_type]
        end = offset + item_bytes * math.prod(shape)
        entries[recipe.name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-(8 + len(body)) % _ALIGN_BYTES)
    return len(body).to_bytes(8, "little") + body, offset
