"""What a Hugging Face ``config.json`` says about a model's keys and values.

Families name the same numbers differently, and some omit what their code assumes (``families``). A
model that keeps K and V in another form than heads of one width is refused: a silently wrong plan
is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagemesh.cli.planning.families import (
    ASSUMED,
    CONTEXT,
    ENCODER_ENDINGS,
    ENCODER_FAMILIES,
    ENCODER_FIELDS,
    EVERY_LAYER_ATTENDS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MULTI_QUERY_FAMILIES,
    MULTI_QUERY_KINDS,
    NOT_ALL_LAYERS_ATTEND,
    ORDINARY_FORMS,
    OTHER_FORMS,
    SIZES,
    TEXT_PARTS,
)
from pagemesh.cli.planning.fields import Config, has_any, is_count, number
from pagemesh.cli.planning.windows import read_windows
from pagemesh.runtime.model_types import StoredType
from pagemesh.runtime.yarn import stretched_tokens
from pagemesh.wire.errors import ConfigError, shown_name

LAYER_COUNT_MAX = 1 << 16


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
    longer_context: str = ""
    """A field that names more than ``context_tokens_max``, with its value; empty if none does."""

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
        if not isinstance(part, Mapping):
            continue
        inner = part.get(TEXT_PARTS[0])  # Qwen's omni models have it in a part of a part
        fields = {**part, **inner} if isinstance(inner, Mapping) else part
        if has_any(fields, ("model_type", *LAYERS)):
            return {**config, **fields}
    return config


def read_shape(config: Config, where: str) -> ModelShape:
    """The shape that ``config`` describes. Raises ``ConfigError`` that names ``where`` and the
    field that is missing, invalid, or says that pages cannot hold this model's K and V."""
    whole, config = config, decoder_part(config)
    family = str(config.get("model_type") or "model")
    config = {**_assumed(config, family), **config}
    _refuse_encoders(whole, config, where)
    _refuse_other_forms(config, where)
    layers = number(config, LAYERS, where)
    if layers > LAYER_COUNT_MAX:
        raise ConfigError(f"{where}: has {layers:,} layers; up to {LAYER_COUNT_MAX:,} are planned")
    heads = number(config, HEADS, where)
    kv_heads = _kv_heads(config, family, heads, where)
    if heads % kv_heads:
        raise ConfigError(
            f"{where}: {heads} query heads cannot share {kv_heads} key/value heads evenly"
        )
    head_dim = _head_dim(config, heads, where)
    for name, count in {"swa_num_key_value_heads": kv_heads, "v_head_dim": head_dim}.items():
        if config.get(name) not in (None, 0, count):
            raise ConfigError(
                f"{where}: {name} is not {count} as in other fields; no page can hold that"
            )
    if not has_any(config, CONTEXT):
        raise ConfigError(
            f"{where}: does not say how long the context may be; add {CONTEXT[0]} to a copy of it"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    context = stretched_tokens(number(config, CONTEXT, where), rope)
    windows, window = read_windows(config, family, layers, context, where)
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
        longer_context=_longer_context(config, context),
    )


def _assumed(config: Config, family: str) -> Config:
    """What the family's code assumes, but for sizes that ``config`` says by another name. A context
    by another name does not count: `transformers`, and so `pagemesh up`, ignore it."""
    said = {name for names in SIZES if has_any(config, names) for name in names}
    return {name: value for name, value in ASSUMED.get(family, {}).items() if name not in said}


def _refuse_encoders(whole: Config, config: Config, where: str) -> None:
    """``config`` is that of the decoder, if ``whole`` has one."""
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{where}: is an encoder-decoder; pages hold K and V of decoders only")
    given, family = whole.get("architectures"), whole.get("model_type")
    names = given if isinstance(given, list) and given else [family]
    is_like_bert = str(family) in ENCODER_FAMILIES or has_any(config, ENCODER_FIELDS)
    if all(str(one).endswith(ENCODER_ENDINGS) for one in names) or (
        is_like_bert and not config.get("is_decoder")
    ):
        raise ConfigError(
            f"{where}: {shown_name(names[0])} is an encoder, which keeps no K and V between steps"
        )


def _refuse_other_forms(config: Config, where: str) -> None:
    for name, what in OTHER_FORMS.items():
        if config.get(name) and config[name] != ORDINARY_FORMS.get(name):
            raise ConfigError(f"{where}: {name} says that the model {what}; no page can hold that")
    if config.get("layer_types"):
        return
    for name in NOT_ALL_LAYERS_ATTEND:
        value, harmless = config.get(name), EVERY_LAYER_ATTENDS.get(name, ())
        entries = value if isinstance(value, list) else [value]
        if value and not all(one in harmless for one in entries):
            raise ConfigError(
                f"{where}: {name} says that not every layer has attention; pages cannot hold "
                "the state of the others"
            )


def _kv_heads(config: Config, family: str, heads: int, where: str) -> int:
    if family in MULTI_QUERY_FAMILIES and not config.get("new_decoder_architecture"):
        if config.get("multi_query", True):
            return 1
    nested = config.get("attn_config")  # MPT and DBRX keep it there
    nested = nested if isinstance(nested, Mapping) else {}
    if nested.get("kv_n_heads"):
        return number(nested, ("kv_n_heads",), where)
    kinds = (str(nested.get("attn_type")), str(config.get("attention_head_type")))
    if not MULTI_QUERY_KINDS.isdisjoint(kinds):
        return 1
    if config.get("multi_query_attention") is False:  # ChatGLM, which then ignores its group count
        return heads
    if has_any(config, KV_HEADS):
        return number(config, KV_HEADS, where)
    return 1 if config.get("multi_query_attention") is True else heads


def _head_dim(config: Config, heads: int, where: str) -> int:
    if has_any(config, HEAD_DIM):
        return number(config, HEAD_DIM, where)
    hidden = number(config, HIDDEN, where)
    if hidden % heads:
        raise ConfigError(f"{where}: hidden size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def _longer_context(config: Config, context: int) -> str:
    for name in CONTEXT:
        if is_count(config.get(name)) and config[name] > context:
            return f"{name} {config[name]:,}"
    return ""
