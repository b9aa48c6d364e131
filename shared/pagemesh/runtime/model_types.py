"""The types in which a worker stores and computes: as configured, or as its model is stored."""

from __future__ import annotations

import collections
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pagemesh.kernels.layout import KvDtype
from pagemesh.runtime.model_folder import weight_files
from pagemesh.runtime.settings import WorkerConfig

StoredType = Literal["float32", "bfloat16", "float16"]
"""What a checkpoint may keep its weights as, and what a GPU computes in."""
_PACKED = frozenset({"U8", "I32", "F4", "F8_E8M0", "F8_E4M3", "F8_E5M2"})
"""What quantised weights are packed in, and their scales: no type to compute in, however many."""
_NAMES: dict[str, StoredType] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def compute_type(config: WorkerConfig, stored: StoredType) -> StoredType:
    """The type of weights and activations on a GPU, for a checkpoint with ``stored`` weights."""
    if config.dtype == "auto":
        return stored
    return "float32" if config.dtype == "int8" else config.dtype


def page_type(config: WorkerConfig, stored: StoredType) -> KvDtype:
    """The type of K and V in pages, for a checkpoint with ``stored`` weights. A GPU's kernels
    multiply in the type of the pages, and are fast if that is half precision."""
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return "float32" if config.device == "cpu" else compute_type(config, stored)


def with_types(config: WorkerConfig) -> WorkerConfig:
    """``config``, whose model is a folder, with its ``auto`` types resolved and the others as they
    are, so that all workers of a mesh can be given the same. Raises ``ConfigError`` for a broken
    index."""
    stored = type_for(config)
    dtype = "float32" if config.device == "cpu" else stored
    return replace(
        config,
        dtype=dtype if config.dtype == "auto" else config.dtype,
        kv_dtype=page_type(config, stored),
    )


def type_for(config: WorkerConfig) -> StoredType:
    """The ``stored_type`` of the model of ``config``, which is a folder; float32 on a CPU, where
    nothing depends on it. Raises ``ConfigError`` for a broken index."""
    return "float32" if config.device == "cpu" else stored_type(Path(config.model))


def stored_type(folder: Path) -> StoredType:
    """``told_type``, or float32 where the files tell none."""
    return told_type(folder) or "float32"


def told_type(folder: Path) -> StoredType | None:
    """The type of most numbers in the safetensors of ``folder`` that are not packed; float32 if
    that is any other type. None if there are none, or if the files cannot be read, which loading
    them will report. Raises ``ConfigError`` for a broken index."""
    from safetensors import SafetensorError, safe_open  # most commands never need it

    counts: collections.Counter[str] = collections.Counter()
    try:
        for path in weight_files(folder):
            with safe_open(str(path), framework="np") as file:
                for name in file.keys():
                    part = file.get_slice(name)
                    counts[part.get_dtype()] += math.prod(part.get_shape())
    except (SafetensorError, OSError):
        return None
    for packed in _PACKED:
        del counts[packed]
    most = counts.most_common(1)
    return _NAMES.get(most[0][0], "float32") if most else None
