"""The shape of a decoder: the few numbers in which the lean families differ.

All of them are the same stack (norm, attention with rotary positions, norm, gated MLP). They
differ in biases (Qwen2), a norm over each query and key head (Qwen3), how checkpoints store
projections (Phi-3), and constant factors (Granite). All factors but the one on attention scores
are folded into the weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from pagemesh.engine.coverage import lean_obstacle, refuse_unsupported
from pagemesh.runtime.yarn import stretched_tokens
from pagemesh.wire.errors import ConfigError, first_line

_HEAD_DIM_MAX = 512
_CONTEXT_TOKENS_MAX = 1 << 22
"""Every process holds tables of all rotations, 8 bytes per token and pair of a head: 2 GiB at this
limit with heads of 128."""
_MLP_BIASED = ("GraniteForCausalLM", "LlamaForCausalLM")
_BIASED = (*_MLP_BIASED, "Qwen3ForCausalLM")
"""Families whose configuration decides whether there are biases; in the others it is fixed."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: the angle of pair ``i`` at position ``p`` is ``p * frequencies[i]``
    radians; cosine and sine are multiplied by ``scale``."""

    frequencies: tuple[float, ...]
    scale: float

    def canonical(self) -> str:
        """The ``positions`` of ``identity.model_root``: equal strings mean equal angles."""
        return json.dumps(
            {"pairs": "halves", "frequencies": self.frequencies, "scale": self.scale},
            separators=(",", ":"),
        )


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Counts are in elements; ``head_dim`` is the width of one attention head."""

    architecture: str
    layer_count: int
    hidden_size: int
    head_count: int
    kv_head_count: int
    head_dim: int
    mlp_size: int
    vocab_tokens: int
    context_tokens_max: int
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norm: bool
    """Queries and keys are normalised head by head before rotation (Qwen3)."""
    fused_projections: bool = False
    """The checkpoint already joins query, key and value, and gate and up (Phi-3)."""
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    """Multiplies what attention and MLP add to the residual stream."""
    score_factor: float = 1.0
    """Multiplies attention scores, on top of the inverse root of the head width."""
    logits_factor: float = 1.0

    @property
    def query_size(self) -> int:
        return self.head_count * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_head_count * self.head_dim

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5) * self.score_factor

    def digest(self) -> bytes:
        """SHA-256 of every field but ``rope``: of all that gives the weights their meaning."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "rope"}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


class LeanObstacleError(ConfigError):
    """Our own forward pass cannot run this model; the fallback may."""


def decoder_config(source: Any, *, where: str) -> DecoderConfig:
    """The decoder that a ``transformers`` configuration describes.

    Raises ``ConfigError`` naming ``where`` and the reason when this engine cannot run it, and
    ``LeanObstacleError`` where another path might.
    """
    architecture = refuse_unsupported(source, where)
    if obstacle := lean_obstacle(source, architecture):
        raise LeanObstacleError(f"{where}: the lean forward pass cannot run this: {obstacle}")
    model_type = getattr(source, "model_type", "")
    if model_type != architecture.removesuffix("ForCausalLM").lower():
        raise not_its_own(where, architecture, f"its model_type is {model_type!r}")
    try:
        config = _described(source, architecture, where)
    except AttributeError as error:
        raise not_its_own(where, architecture, first_line(error)) from None
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: config.json holds a value of the wrong kind: {first_line(error)}"
        ) from None
    _check_shape(config, where)
    return config


def not_its_own(where: str, architecture: str, why: str) -> ConfigError:
    """The error when ``architectures`` and the rest of config.json are of different models: one of
    them would be computed with the biases and windows of the other."""
    return ConfigError(
        f"{where}: config.json does not describe a model of architecture {architecture}: {why}"
    )


def _described(source: Any, architecture: str, where: str) -> DecoderConfig:
    attention_bias = architecture in _BIASED and bool(getattr(source, "attention_bias", False))
    heads = int(source.num_attention_heads)
    head_dim = int(getattr(source, "head_dim", None) or source.hidden_size // heads)
    _check_head_dim(head_dim, where)  # before rotations are computed for it
    return DecoderConfig(
        architecture=architecture,
        layer_count=int(source.num_hidden_layers),
        hidden_size=int(source.hidden_size),
        head_count=heads,
        kv_head_count=int(getattr(source, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        mlp_size=int(source.intermediate_size),
        vocab_tokens=int(source.vocab_size),
        context_tokens_max=context_tokens_of(source),
        norm_epsilon=float(source.rms_norm_eps),
        rope=_rope(source, head_dim, where),
        tied_embeddings=bool(source.tie_word_embeddings),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=architecture in _MLP_BIASED and bool(getattr(source, "mlp_bias", False)),
        head_norm=architecture == "Qwen3ForCausalLM",
        fused_projections=architecture == "Phi3ForCausalLM",
        **(_granite_factors(source, head_dim) if architecture == "GraniteForCausalLM" else {}),
    )


def context_tokens_of(source: Any) -> int:
    """Context length, in tokens, that a ``transformers`` configuration gives, with YaRN scaling."""
    given = int(source.max_position_embeddings)
    return stretched_tokens(given, getattr(source, "rope_parameters", None))


def _granite_factors(source: Any, head_dim: int) -> dict[str, float]:
    return {
        "embedding_factor": float(source.embedding_multiplier),
        "residual_factor": float(source.residual_multiplier),
        "score_factor": float(source.attention_multiplier) * float(head_dim) ** 0.5,
        "logits_factor": 1.0 / float(source.logits_scaling),
    }


def _check_shape(config: DecoderConfig, where: str) -> None:
    if config.context_tokens_max < 1:
        raise ConfigError(f"{where}: max_position_embeddings is {config.context_tokens_max}")
    if config.context_tokens_max > _CONTEXT_TOKENS_MAX:
        raise ConfigError(
            f"{where}: max_position_embeddings, or what rope_parameters make of it, is "
            f"{config.context_tokens_max} tokens; up to {_CONTEXT_TOKENS_MAX} have tables of "
            "rotations; give less in a copy of config.json"
        )
    if config.layer_count < 1:
        raise ConfigError(f"{where}: num_hidden_layers is {config.layer_count}")
    if not math.isfinite(config.norm_epsilon):
        raise ConfigError(f"{where}: rms_norm_eps is {config.norm_epsilon}")
    if config.kv_head_count < 1 or config.head_count % config.kv_head_count:
        raise ConfigError(
            f"{where}: {config.head_count} query heads cannot share "
            f"{config.kv_head_count} key/value heads evenly"
        )
    if not all(map(math.isfinite, (*config.rope.frequencies, config.rope.scale))):
        raise ConfigError(f"{where}: rope_parameters make angles that are no numbers")


def _check_head_dim(head_dim: int, where: str) -> None:
    if head_dim % 2 or not 2 <= head_dim <= _HEAD_DIM_MAX:
        raise ConfigError(
            f"{where}: head width {head_dim} is not an even number up to {_HEAD_DIM_MAX}"
        )


def _rope(source: Any, head_dim: int, where: str) -> Rope:
    """Rotary frequencies in float32, as in training. Those of scaled variants come from
    ``transformers``, so that a model has the same angles here as there."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(getattr(source, "rope_parameters", None) or {})
    kind = str(parameters.get("rope_type", "default"))
    if kind == "default":
        base = float(parameters.get("rope_theta", 10_000.0))
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return Rope(tuple((1.0 / base**steps).tolist()), 1.0)
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](source, device=torch.device("cpu"))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: broken rope_parameters: {error}") from None
    return Rope(tuple(frequencies.float().tolist()), float(scale))
