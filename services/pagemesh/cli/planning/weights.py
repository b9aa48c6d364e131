"""How much memory a model's weights take: from its files, else from its shape.

Devices keep every parameter once, in one type. A CPU looks embedding rows up in the checkpoint, as
stored, and keeps everything else as matrices, including a head that is tied to the embeddings. If
asked for float32, it keeps weights that are stored in half precision that way; bfloat16 takes
twelve bits where possible, which the plan does not count on. The CPU's int8 scales, padding and
norms (float32) are left out: a few per cent, for large models less than 1 %.

A quantised checkpoint takes what its files take: how many parameters an element packs depends on
the method, and the requested type does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pagemesh.cli.planning.families import HIDDEN, TEXT_PARTS
from pagemesh.cli.planning.fields import Config, is_count
from pagemesh.cli.planning.shape import ModelShape, decoder_part
from pagemesh.runtime.model_folder import indexed_bytes, weight_files
from pagemesh.wire.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
_HALVES = frozenset({"float16", "bfloat16"})
_HEAD = "lm_head.weight"
_WIDTHS = ("word_embed_proj_dim", *HIDDEN)  # OPT's embeddings may be narrower than its layers
_HEADER_LENGTH_BYTES = 8
_GATED = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "phi3"})
"""Families for which ``parameter_count`` is exact."""
_TIED = frozenset(
    {
        "biogpt", "bloom", "cohere", "cohere2", "cohere2_moe", "ctrl", "ernie4_5", "ernie4_5_moe",
        "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo",
        "gpt_neox_japanese", "granite_swa", "jetmoe", "lfm2", "lfm2_moe", "modernbert-decoder",
        "mpt", "openai-gpt", "opt", "smollm3", "starcoder2", "vaultgemma", "xglm",
    }
)  # fmt: skip
"""Families that tie the head to the embeddings unless their config.json says otherwise."""
_EXPERTS = frozenset({"mixtral", "qwen3_moe"})


@dataclass(frozen=True, slots=True)
class Weights:
    """``count_bytes`` in memory, and a text on where that number comes from. ``parameter_count`` is
    None where weights are packed, or of a size that was given."""

    count_bytes: int
    source: str
    parameter_count: int | None = None


def counted_type(stored: str) -> str:
    """The type that ``stored`` is counted as: an unknown one as bfloat16."""
    return stored if stored in DTYPE_BYTES else "bfloat16"


def weights_of(
    folder: Path, config: Config, shape: ModelShape, dtype: str, *, on_cpu: bool
) -> Weights | None:
    """The weights in ``dtype``; None if their size is unknown.

    ``folder`` may hold safetensors, their index, or neither. Raises ``ConfigError`` for broken
    files.
    """
    files = weight_files(folder)
    has_files = bool(files) and all(path.is_file() for path in files)
    indexed = 0 if has_files else indexed_bytes(folder)
    if _is_quantised(config):
        if not has_files:
            return Weights(indexed, "quantised, as its index says") if indexed else None
        return Weights(sum(map(_stored_bytes, files)), "quantised, as its files store it")
    if has_files:
        sizes = dict(pair for path in files for pair in _element_counts(path))
        count, source = sum(sizes.values()), "from its files"
        is_tied = _is_tied(config, shape) and _HEAD not in sizes
    else:
        count, source = parameter_count(config, shape) or 0, "from config.json"
        if not count:
            count = indexed // DTYPE_BYTES[counted_type(shape.dtype)]
            source = "from its index"
        if not count:
            return None
        is_tied = _is_tied(config, shape)
    if not on_cpu:
        # Granite's factors are folded into the weights, so its head differs from the embeddings.
        apart = _table_count(config) if is_tied and shape.family == "granite" else 0
        size = (count + apart) * DTYPE_BYTES[dtype]
    else:
        asked = dtype
        dtype = shape.dtype if asked == "float32" and shape.dtype in _HALVES else asked
        table = min(_table_count(config), count)
        matrices = count if is_tied else count - table
        size = matrices * DTYPE_BYTES[dtype] + table * DTYPE_BYTES[counted_type(shape.dtype)]
        source += ", as a CPU keeps them"
        if dtype == "bfloat16":
            source += " (with AVX2 or AVX-512, and no matrix tiles: a quarter less)"
    return Weights(size, f"{dtype}, {_short(count)} parameters, {source}", count)


def _table_count(config: Config) -> int:
    """Parameters of the embeddings; 0 if unknown."""
    config = decoder_part(config)
    width = next((name for name in _WIDTHS if config.get(name) is not None), HIDDEN[0])
    try:
        return _count(config, "vocab_size") * _count(config, width)
    except KeyError:
        return 0


def _is_quantised(config: Config) -> bool:
    return any(part.get("quantization_config") for part in (config, decoder_part(config)))


def _is_tied(config: Config, shape: ModelShape) -> bool:
    return bool(decoder_part(config).get("tie_word_embeddings", shape.family in _TIED))


def parameter_count(config: Config, shape: ModelShape) -> int | None:
    """Parameters of a decoder with a gated MLP, exact for ``_GATED``; None for other families, and
    for multimodal models, whose other parts have parameters too."""
    family = shape.family
    if any(config.get(name) for name in TEXT_PARTS):
        return None
    if family not in _GATED or config.get("mlp_only_layers"):
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
    if not is_count(value):
        raise KeyError(name)
    return value


def _element_counts(path: Path) -> list[tuple[str, int]]:
    """Name and element count of each tensor of a safetensors file, from its header alone."""
    with _opened(path) as file:
        return [(name, math.prod(file.get_slice(name).get_shape())) for name in file.keys()]


def _stored_bytes(path: Path) -> int:
    """Bytes of all tensors of a safetensors file. A file that can be opened has no gaps, so the
    tensors are all that follows the header and its length, whatever their types."""
    with _opened(path), path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        return path.stat().st_size - _HEADER_LENGTH_BYTES - header_bytes


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; only its header is read. Raises ``ConfigError`` for a broken one."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model {path}: broken safetensors file: {error}") from None


def _short(count: int) -> str:
    """``70.6 billion``, as models are named."""
    for factor, word in ((10**9, "billion"), (10**6, "million")):
        if count >= factor:
            return f"{count / factor:.3g} {word}"
    return f"{count:,}"
