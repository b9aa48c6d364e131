"""Prepared weights: one file a model that every process of the host maps.

A checkpoint in half precision has to be converted for a CPU, and matrices have to be packed
as the kernels read them. Doing that in each process would hold each result once per process,
so the first one writes them to a file, under a lock, and all map it: the host's page cache
holds them once. Tensors that the checkpoint already has as they are needed (float32, not
packed) are mapped from there and are not written again, nor are the lean path's embeddings in half
precision.

Matrices are packed here, once: what a checkpoint has in half precision as that, or bfloat16 in
twelve bits, which gives the results of float32; or as the type that was asked for. Everything else
is float32.

The file is in safetensors format, written tensor by tensor so that no more than one is in
memory. Its name is the digest of what it holds: it is never changed, only made or deleted.

The cache is bounded: before another file is written, all but the ``PREPARED_COUNT_MAX - 1`` most
recently loaded ones are deleted. A process that has mapped one keeps it; the next start prepares
it again. What else lies in the cache (digests, configurations, locks) is under 1 KB a model.
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
"""Part of the file's name: weights prepared in another way are another file."""
_SLIM_FORMAT = "slim-panels16-1"
"""In place of that of ``float32``, on machines that multiply with slim weights."""
_STORED: dict[WeightType, tuple[str, int]] = {
    "float32": ("F32", 4), "int8": ("I8", 1), "bfloat16": ("BF16", 2), "float16": ("F16", 2),
    "slim_bfloat16": ("U8", 1),
}  # fmt: skip
"""What a type is called in a file, and the bytes of an element."""
PREPARED_COUNT_MAX = 4
"""Files kept, each up to as large as its model in float32."""
_NAMES = "[0-9a-f]" * 32 + ".*-panels*"
"""Ours and nobody else's, of whatever format: users may name any folder as the cache."""
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
    """Every tensor of ``recipes`` by name, matrices as panels of ``weight_type``, mapped from
    ``checkpoint`` (an open one) or from the prepared file in ``cache``, which is written when it
    is not there. Nobody may write to them. ``digest``: see ``kept_digest``.

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
        checkpoint.require_unchanged()  # or it would be another's under this name, for good

    return tensors | load_or_write(prepared_name(digest, weight_type), cache, write)


def kept_digest(digest: bytes, weight_type: AskedType) -> bytes:
    """What names weights of ``digest`` that are kept as ``weight_type``: others compute other
    K and V, so it goes into the model's root."""
    if weight_type == "float32":
        return digest
    how = "symmetric, a scale an output, 1" if weight_type == "int8" else "to the nearest"
    rows = "bfloat16 rows" if rounds_rows(weight_type) else "float32 rows"
    return hashlib.sha256(digest + f"{weight_type} {how}, {rows}".encode()).digest()


def kept_type(parts: Iterable[torch.Tensor], weight_type: AskedType) -> WeightType:
    """Of a matrix that is made of ``parts``, where ``weight_type`` was asked for."""
    if weight_type != "float32":
        return weight_type
    found = list(parts)
    exact = exact_type(*found)
    if exact != "bfloat16" or not slim.pays():
        return exact
    return "slim_bfloat16" if slim.fits(joined(found)) else exact


def prepared_name(digest: bytes, weight_type: AskedType, made_by: str = "") -> str:
    """Of the file that ``load_or_write`` keeps; ``made_by`` tells apart what is named alike."""
    form = _SLIM_FORMAT if weight_type == "float32" and slim.pays() else _FORMATS[weight_type]
    return f"{digest.hex()[:32]}.{made_by}{form}"


def load_or_write(name: str, cache: Path, write: Callable[[Path], None]) -> dict[str, torch.Tensor]:
    """Every tensor of the prepared file ``name`` in ``cache``, mapped. When it is not there,
    ``write`` is called with the path to make, by one process of the host at a time; what it
    made counts when it is whole.

    Raises ``ConfigError`` like ``write``, and for a disk that is full.
    """
    path = cache / f"{name}.safetensors"
    with locked(path.with_suffix(".lock")):
        tensors = None
        if path.is_file():
            with contextlib.suppress(ConfigError):  # a loss of power may have cut it short
                tensors = _map(path)
        if tensors is None:
            _make_room(cache)
            _write_whole(path, write)
            tensors = _map(path)
        with contextlib.suppress(OSError):  # another user's, whose time is not ours to set
            os.utime(path)  # what was loaded last goes last
    return tensors


def _make_room(cache: Path) -> None:
    """Delete what was not loaded for longest, and what a killed process left half written."""
    whole = sorted(cache.glob(f"{_NAMES}.safetensors"), key=_loaded_ns, reverse=True)
    for path in [*whole[PREPARED_COUNT_MAX - 1 :], *cache.glob(f"{_NAMES}.partial")]:
        with contextlib.suppress(OSError), path.with_suffix(".lock").open("a") as lock:
            if try_lock(lock.fileno()):  # else somebody loads or writes it right now
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
    """Raises ``ConfigError`` when prepared weights of so many bytes find no room."""
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
