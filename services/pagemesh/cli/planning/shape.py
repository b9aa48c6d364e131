"""What a Hugging Face ``config.json`` says about a model's keys and values.

Families name the same numbers differently, and some omit what their code assumes. A model that
keeps K and V in another form than heads of one width is refused: a silently wrong plan is worse
than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagemesh.runtime.model_types import StoredType
from pagemesh.runtime.yarn import stretched_tokens
from pagemesh.wire.errors import ConfigError

Config = Mapping[str, Any]

COUNT_MAX = 1 << 32
TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Where multimodal models keep the decoder's configuration."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS = (
    "num_key_value_heads_per_layer", "num_key_value_heads", "num_kv_heads", "n_head_kv",
    "multi_query_group_num", "num_attention_groups",
)  # fmt: skip
_HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_CONTEXT = (
    "max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "n_ctx",
    "model_max_length",
)  # fmt: skip
_NOT_ALL_LAYERS_ATTEND = (
    "attn_layer_period", "layers_block_type", "hybrid_override_pattern", "attn_type_list",
    "full_attention_interval", "linear_attn_config", "mamba_d_state", "block_types",
    "state_size", "ssm_state_size",
)  # fmt: skip
_WINDOW_LAYERS = frozenset({"sliding_attention", "chunked_attention"})
_FULL_LAYERS = frozenset({"full_attention", "attention"})
_MULTI_QUERY = frozenset({"falcon", "RefinedWebModel", "gpt_bigcode"})
_ASSUMED: Mapping[str, Config] = {
    "RefinedWeb": {"max_position_embeddings": 2_048},  # Falcon's original name
    "RefinedWebModel": {"max_position_embeddings": 2_048},
    "bloom": {"seq_length": 2_048},  # the length of training; ALiBi itself has no limit
    "cohere2": {
        "max_position_embeddings": 8_192, "sliding_window": 4_096, "sliding_window_pattern": 4,
    },
    "falcon": {"max_position_embeddings": 2_048},
    "gemma": {"head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8_192},
    "gemma2": {
        "head_dim": 256, "num_key_value_heads": 4, "max_position_embeddings": 8_192,
        "sliding_window": 4_096, "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131_072, "sliding_window": 4_096, "sliding_window_pattern": 6,
    },
    "gpt2": {"n_positions": 1_024},
    "gpt_bigcode": {"n_positions": 1_024},
    "llama": {"max_position_embeddings": 2_048},
    "mistral": {
        "num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4_096,
    },
    "mixtral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072},
    "mllama_text_model": {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
    "phi3": {"max_position_embeddings": 4_096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768},
    "qwen3_moe": {"num_key_value_heads": 4, "max_position_embeddings": 32_768},
}  # fmt: skip
"""Defaults in a family's code, which its config.json may omit."""
_ENCODERS = "ForMaskedLM"
_ENCODER_FIELDS = ("type_vocab_size", "relative_attention_num_buckets")
"""Fields that BERT and MPNet have, with whatever head they were saved, and no decoder has."""
_OTHER_FORMS: Mapping[str, str] = {
    "kv_lora_rank": "keeps one latent a token instead of K and V of each head (MLA)",
    "num_kv_shared_layers": "has layers that share K and V with others",
    "use_cla": "has layers that share K and V with others",
    "global_head_dim": "has heads of several widths",
    "block_configs": "has layers that differ in their heads",
    "per_layer_config": "has layers that differ in their heads",
    "hybrid_layer_pattern": "has heads of their own in layers with a window",
    "cross_attention_layers": "has layers that keep K and V of images, not of tokens",
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Counts are in elements, ``head_dim`` is the width of one head."""

    family: str
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    context_tokens_max: int
    window_layer_count: int
    """Layers that look back at most ``window_tokens``."""
    window_tokens: int
    dtype: str
    """The checkpoint's type as ``transformers`` names it; empty if config.json has none."""

    @property
    def stored(self) -> StoredType:
        """``dtype`` if workers can compute in it, else float32."""
        known: dict[str, StoredType] = {"bfloat16": "bfloat16", "float16": "float16"}
        return known.get(self.dtype, "float32")

    @property
    def sharing(self) -> str:
        if self.kv_head_count == self.head_count:
            return "multi-head"
        return "multi-query" if self.kv_head_count == 1 else "grouped"


def decoder_part(config: Config) -> Config:
    """The fields of the decoder, which override those of the whole model."""
    for name in TEXT_PARTS:
        part = config.get(name)
        if isinstance(part, Mapping) and any(key in part for key in _LAYERS):
            return {**config, **part}
    return config


def read_shape(config: Config, where: str) -> ModelShape:
    """The shape that ``config`` describes. Raises ``ConfigError`` that names ``where`` and the
    field that is missing, invalid, or says that pages cannot hold this model's K and V."""
    config = decoder_part(config)
    family = str(config.get("model_type") or "model")
    config = {**_ASSUMED.get(family, {}), **config}
    _refuse_other_forms(config, where)
    layers = _number(config, _LAYERS, where)
    heads = _number(config, _HEADS, where)
    kv_heads = _kv_heads(config, family, heads, where)
    if heads % kv_heads:
        raise ConfigError(
            f"{where}: {heads} query heads cannot share {kv_heads} key/value heads evenly"
        )
    if any(config.get(name) is not None for name in _HEAD_DIM):
        head_dim = _number(config, _HEAD_DIM, where)
    else:
        hidden = _number(config, HIDDEN, where)
        if hidden % heads:
            raise ConfigError(f"{where}: hidden size {hidden} is no multiple of {heads} heads")
        head_dim = hidden // heads
    for name, count in {"swa_num_key_value_heads": kv_heads, "v_head_dim": head_dim}.items():
        if config.get(name) not in (None, count):
            raise ConfigError(
                f"{where}: {name} is not {count} as in other fields; no page can hold that"
            )
    if all(config.get(name) is None for name in _CONTEXT):
        raise ConfigError(
            f"{where}: does not say how long the context may be; add {_CONTEXT[0]} to a copy of it"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    context = stretched_tokens(_number(config, _CONTEXT, where), rope)
    windows, window = _windows(config, family, layers, context, where)
    return ModelShape(
        family=family,
        layer_count=layers,
        head_count=heads,
        kv_head_count=kv_heads,
        head_dim=head_dim,
        context_tokens_max=context,
        window_layer_count=windows,
        window_tokens=window,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "").split(".")[-1],
    )


def _refuse_other_forms(config: Config, where: str) -> None:
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{where}: is an encoder-decoder; pages hold K and V of decoders only")
    given = config.get("architectures")
    names = given if isinstance(given, list) and given else [config.get("model_type")]
    is_like_bert = any(config.get(field) is not None for field in _ENCODER_FIELDS)
    if all(str(one).endswith(_ENCODERS) for one in names) or (
        is_like_bert and not config.get("is_decoder")
    ):
        raise ConfigError(
            f"{where}: {names[0]} is an encoder, which keeps no K and V between steps"
        )
    for name, what in _OTHER_FORMS.items():
        if config.get(name):
            raise ConfigError(f"{where}: {name} says that the model {what}; no page can hold that")
    for name in _NOT_ALL_LAYERS_ATTEND:
        if config.get(name) and not config.get("layer_types"):
            raise ConfigError(
                f"{where}: {name} says that not every layer has attention; pages cannot hold "
                "the state of the others"
            )


def _number(config: Config, names: tuple[str, ...], where: str) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, list):
            raise ConfigError(f"{where}: {name} differs by layer; no page can hold that")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= COUNT_MAX:
            raise ConfigError(f"{where}: {name} is {str(value)[:40]!r}, not a count")
        return value
    raise ConfigError(f"{where}: has no {names[0]}; is it a decoder's config.json?")


def _kv_heads(config: Config, family: str, heads: int, where: str) -> int:
    if family in _MULTI_QUERY and not config.get("new_decoder_architecture"):
        if config.get("multi_query", True):
            return 1
    nested = config.get("attn_config")  # MPT and DBRX keep it there
    if isinstance(nested, Mapping) and nested.get("kv_n_heads"):
        return _number(nested, ("kv_n_heads",), where)
    if config.get("multi_query_attention") is False:  # ChatGLM, which then ignores its group count
        return heads
    named = any(config.get(name) is not None for name in _KV_HEADS)
    return _number(config, _KV_HEADS, where) if named else heads


def _windows(config: Config, family: str, layers: int, context: int, where: str) -> tuple[int, int]:
    """How many layers have a window, and its length in tokens."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        if len(kinds) != layers:
            raise ConfigError(f"{where}: layer_types names {len(kinds)} of {layers} layers")
        unknown = sorted(set(map(str, kinds)) - _WINDOW_LAYERS - _FULL_LAYERS)
        if unknown:
            raise ConfigError(
                f"{where}: layers of type {', '.join(unknown)} keep state that pages cannot hold"
            )
        count = sum(kind in _WINDOW_LAYERS for kind in kinds)
        if not count:
            return 0, 0
        name = "attention_chunk_size" if "chunked_attention" in kinds else "sliding_window"
        return count, min(_number(config, (name,), where), context)
    if config.get("sliding_window") is None:
        return 0, 0
    # Qwen has a switch, which is off if absent; other families have none.
    if not config.get("use_sliding_window", not family.startswith("qwen")):
        return 0, 0
    window = _number(config, ("sliding_window",), where)
    if window >= context:
        return 0, 0
    if family.startswith("qwen"):
        below = config.get("max_window_layers", 28)
        return layers - (min(layers, below) if isinstance(below, int) and below > 0 else 0), window
    if config.get("sliding_window_pattern") is None:
        return layers, window
    return layers - layers // _number(config, ("sliding_window_pattern",), where), window
