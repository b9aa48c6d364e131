"""How much memory a model's weights take: from its files, else from its shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pagemesh.cli.planning.shape import Config, ModelShape, decoder_part
from pagemesh.runtime.model_folder import weight_files
from pagemesh.wire.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
_GATED = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "phi3"})
"""Families whose every parameter the formula below counts."""
_EXPERTS = frozenset({"mixtral", "qwen3_moe"})


@dataclass(frozen=True, slots=True)
class Weights:
    """``count_bytes`` in memory, and where that is known from."""

    count_bytes: int
    source: str


def weights_of(folder: Path, config: Config, shape: ModelShape, dtype: str) -> Weights | None:
    """The weights in ``dtype``, None when nothing says how large they are. Of int8 the scales are
    left out, which are under 1 %.

    ``folder`` may hold safetensors, their index, or neither. Raises ``ConfigError`` for broken
    files.
    """
    item_bytes, table_bytes = DTYPE_BYTES[dtype], _table_bytes(config, shape, dtype)
    files = weight_files(folder)
    if files and all(path.is_file() for path in files):
        stored = sum(map(_element_count, files))
        size = stored * item_bytes + table_bytes
        return Weights(size, f"{dtype}, {_short(stored)} parameters, from its files")
    if config.get("quantization_config"):
        return None
    count = parameter_count(config, shape)
    if count is None:
        return None
    size = count * item_bytes + table_bytes
    return Weights(size, f"{dtype}, {_short(count)} parameters, from config.json")


def _table_bytes(config: Config, shape: ModelShape, dtype: str) -> int:
    """What a table of embeddings takes beyond ``dtype``: beside int8 matrices it stays as it is
    stored, and a head that is tied to it is a matrix of its own."""
    if dtype != "int8":
        return 0
    config = decoder_part(config)
    try:
        count = _count(config, "vocab_size") * _count(config, "hidden_size")
    except KeyError:
        return 0
    stored_bytes = DTYPE_BYTES.get(shape.dtype, DTYPE_BYTES["float32"])
    return (stored_bytes if _is_tied(config, shape) else stored_bytes - 1) * count


def _is_tied(config: Config, shape: ModelShape) -> bool:
    return bool(config.get("tie_word_embeddings", shape.family == "gemma"))


def parameter_count(config: Config, shape: ModelShape) -> int | None:
    """Parameters of a decoder with a gated MLP, exact for the families named above; None for
    others."""
    config = decoder_part(config)
    family = shape.family
    if family not in _GATED or config.get("mlp_only_layers") or "text_config" in config:
        return None
    try:
        vocab, hidden = _count(config, "vocab_size"), _count(config, "hidden_size")
        inner = _count(config, "intermediate_size")
        mlp = 3 * hidden * inner + ((2 * inner + hidden) if config.get("mlp_bias") else 0)
        if family in _EXPERTS:
            newer = config.get("num_local_experts") is not None
            experts = _count(config, "num_local_experts" if newer else "num_experts")
            width = inner if family == "mixtral" else _count(config, "moe_intermediate_size")
            mlp = experts * 3 * hidden * width + hidden * experts
    except KeyError:
        return None
    queries, pairs = shape.head_count * shape.head_dim, shape.kv_head_count * shape.head_dim
    attention = 2 * hidden * (queries + pairs)
    if family == "qwen2" or config.get("attention_bias"):
        attention += queries + 2 * pairs + (hidden if family != "qwen2" else 0)
    if family in ("qwen3", "qwen3_moe"):
        attention += 2 * shape.head_dim
    embeddings = vocab * hidden * (1 if _is_tied(config, shape) else 2)
    return embeddings + shape.layer_count * (attention + mlp + 2 * hidden) + hidden


def _count(config: Config, name: str) -> int:
    """Raises ``KeyError`` for what is no count."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise KeyError(name)
    return value


def _element_count(path: Path) -> int:
    """Of all tensors of a safetensors file, read from its header alone."""
    try:
        with safe_open(path, framework="numpy") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model {path}: broken safetensors file: {error}") from None


def _short(count: int) -> str:
    """``70.6 billion``, as models are named."""
    for factor, word in ((10**9, "billion"), (10**6, "million")):
        if count >= factor:
            return f"{count / factor:.3g} {word}"
    return f"{count:,}"
