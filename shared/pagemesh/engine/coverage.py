"""Which models run, and by which path. The only place that decides this.

    lean      our own forward pass (``engine.forward``): families that share one stack of blocks
    fallback  ``transformers``' modules over our pages (``engine.fallback``): any other decoder
              whose attention can be replaced in ``transformers``

The decision is made before weights are read, from the fields of config.json alone. A fallback
model is also compared with ``transformers`` itself, on its own weights, when it loads.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Literal

from pagemesh.runtime.model_folder import read_config
from pagemesh.runtime.yarn import stretched_tokens
from pagemesh.wire.errors import ConfigError, shown_name

Path = Literal["lean", "fallback"]

LEAN = (
    "GraniteForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM",
    "Qwen2ForCausalLM", "Qwen3ForCausalLM",
)  # fmt: skip
"""Lean with full attention, SiLU and rotation of whole heads; otherwise they take the fallback."""
FALLBACK_TESTED = (
    "ApertusForCausalLM", "ArceeForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM",
    "Ernie4_5ForCausalLM", "Exaone4ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "Glm4ForCausalLM",
    "GlmForCausalLM", "GraniteMoeForCausalLM", "HeliumForCausalLM", "HunYuanDenseV1ForCausalLM",
    "MinistralForCausalLM", "MixtralForCausalLM", "OPTForCausalLM", "Olmo2ForCausalLM",
    "Olmo3ForCausalLM", "OlmoForCausalLM", "OlmoeForCausalLM", "PhiForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
)  # fmt: skip
"""Each is tested against ``transformers`` on random weights, as the lean ones are."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of scaling whose angles depend on the position alone. With those whose angles depend on the
length of the sequence, a cached page would become wrong as the sequence grows."""
WHAT_RUNS = "Llama, Mistral, Qwen, Gemma, Phi, Granite, OPT and others run (ops/docs/models.md)"
"""Ends error messages, for users who have to choose another model."""
_DECODER_ENDINGS = ("ForCausalLM", "LMHeadModel")
_SILU = ("silu", "swish")
_WINDOW_FAMILIES = ("Mistral", "Phi3", "Qwen2", "Qwen3")
"""Lean families in which ``sliding_window`` has an effect."""
_WINDOWS_ASSUMED = {"Mistral": 4_096}
"""Window, in tokens, of families whose configuration may leave it out."""
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})
_OTHER_STATES: Mapping[str, str] = {
    "is_encoder_decoder": "is an encoder-decoder",
    "kv_lora_rank": "keeps one latent a token instead of K and V of each head (MLA)",
    "num_kv_shared_layers": "has layers that share K and V with others",
    "use_cla": "has layers that share K and V with others",
    "state_size": "keeps a recurrent state (SSM)",
    "mamba_d_state": "keeps a recurrent state (SSM)",
    "ssm_state_size": "keeps a recurrent state (SSM)",
    "hybrid_override_pattern": "mixes attention with recurrent layers (hybrid)",
    "attn_layer_period": "mixes attention with recurrent layers (hybrid)",
    "use_bidirectional_attention": "attends to what comes later",
}  # fmt: skip
"""Configuration fields of models that pages of K and V are not enough for, with the reason that
the error message gives."""


def path_of(source: Any, where: str) -> Path:
    """The path for the model that ``source`` describes: a ``transformers`` configuration, or the
    fields of a bare config.json as attributes. Raises ``ConfigError``, one line naming ``where``,
    when neither path can run it."""
    architecture = refuse_unsupported(source, where)
    return "fallback" if lean_obstacle(source, architecture) else "lean"


def path_in(folder: pathlib.Path) -> Path:
    """The path for the model in ``folder``, by its config.json as written. Raises ``ConfigError``
    like ``path_of``, also for a config.json that holds values of the wrong kind."""
    where = f"model {folder}"
    source = SimpleNamespace(**read_config(folder / "config.json"))
    try:
        return path_of(source, where)
    except (TypeError, LookupError):
        raise ConfigError(f"{where}: config.json holds values of the wrong kind") from None


def inexact(folder: pathlib.Path) -> ConfigError:
    """The error when deterministic answers are wanted of a model on the fallback path."""
    return ConfigError(
        f"PAGEMESH_DETERMINISTIC (--deterministic): model {folder} runs on the modules of "
        "transformers, whose last bits depend on the batch; leave it out"
    )


def refuse_unsupported(source: Any, where: str) -> str:
    """The architecture, if one of the paths runs it. Raises ``ConfigError`` like ``path_of``."""
    architecture = refuse_form(source, where)
    if not is_tested(architecture):
        _refuse_unknown_class(architecture, where)
    return architecture


def is_tested(architecture: str) -> bool:
    """Whether tests compare this architecture with ``transformers``."""
    return architecture in LEAN or architecture in FALLBACK_TESTED


def refuse_form(source: Any, where: str) -> str:
    """The architecture, if pages can hold all of its state. Does not import ``transformers``.
    Raises ``ConfigError`` like ``path_of``."""
    for field in ("architectures", "layer_types"):
        if not isinstance(getattr(source, field, None) or [], list | tuple):
            raise ConfigError(
                f"{where}: config.json holds values of the wrong kind: {field} is no list of names"
            )
    names = getattr(source, "architectures", None) or ["(none named)"]
    architecture = str(names[0])
    named = f"{where}: architecture {shown_name(architecture)} is not supported"
    if not architecture.endswith(_DECODER_ENDINGS):
        raise ConfigError(
            f"{named}; decoders that generate text are (...{', ...'.join(_DECODER_ENDINGS)})"
        )
    if getattr(source, "quantization_config", None):
        raise ConfigError(
            f"{where}: quantised checkpoints are not supported; use the float32, float16 or "
            "bfloat16 one"
        )
    for field, what in _OTHER_STATES.items():
        if getattr(source, field, None):
            raise ConfigError(f"{named}: it {what}, and pages hold K and V only")
    kinds = sorted(set(getattr(source, "layer_types", None) or []) - _LAYER_KINDS)
    if kinds:
        raise ConfigError(
            f"{where}: layers of type {shown_name(', '.join(map(str, kinds)))} are not supported"
        )
    for kind in rope_kinds(source):
        if kind not in ROPE_TYPES:
            raise ConfigError(
                f"{where}: rotary scaling {kind[:80]!r} is not supported; "
                f"supported are {', '.join(ROPE_TYPES)}"
            )
    return architecture


def lean_obstacle(source: Any, architecture: str) -> str:
    """Why our own forward pass cannot run this model; empty when it can."""
    if architecture not in LEAN:
        return f"architecture {shown_name(architecture)} is not one of {', '.join(LEAN)}"
    activation = getattr(source, "hidden_act", "silu")
    if activation not in _SILU:
        return f"activation {activation!r} is not silu"
    kinds = set(getattr(source, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"attention layers are of type {', '.join(sorted(kinds - {'full_attention'}))}"
    if _has_window(source, architecture):
        return "attention looks back through a sliding window"
    rope = getattr(source, "rope_parameters", None) or {}
    for parts in (rope.get("partial_rotary_factor"), getattr(source, "partial_rotary_factor", 1.0)):
        if parts not in (None, 1.0):
            return "only a part of each head is rotated"
    return ""


def rope_kinds(source: Any) -> Iterator[str]:
    """The kinds of rotary scaling of a configuration, which may differ by type of layer."""
    given = _rope_of(source) or {}
    if not isinstance(given, Mapping):
        raise TypeError("rope_parameters is not a table")
    nested = [part for part in given.values() if isinstance(part, Mapping)]
    for part in nested or [given]:
        yield str(part.get("rope_type") or part.get("type") or "default")


def _has_window(source: Any, architecture: str) -> bool:
    family = architecture.removesuffix("ForCausalLM")
    window = getattr(source, "sliding_window", _WINDOWS_ASSUMED.get(family))
    if window is None or family not in _WINDOW_FAMILIES:
        return False
    # Qwen's switch defaults to off; where layers have types, those were checked already.
    if family.startswith("Qwen"):
        used = bool(getattr(source, "use_sliding_window", False))
        return used and not getattr(source, "layer_types", None)
    # A context that the file leaves out defaults to one that only the family's code knows: rather
    # than guess it, assume that the window is shorter.
    context = getattr(source, "max_position_embeddings", None)
    return context is None or bool(window < stretched_tokens(context, _rope_of(source)))


def _rope_of(source: Any) -> Any:
    return getattr(source, "rope_parameters", None) or getattr(source, "rope_scaling", None)


def _refuse_unknown_class(architecture: str, where: str) -> None:
    """Asks ``transformers``, whose import takes seconds: only for architectures not listed here."""
    import transformers

    named = f"{where}: architecture {shown_name(architecture)} is not supported"
    kind = getattr(transformers, architecture, None)
    if kind is None:
        raise ConfigError(
            f"{named}: transformers {transformers.__version__} does not have it; {WHAT_RUNS}"
        )
    if not getattr(kind, "_supports_attention_backend", False):
        raise ConfigError(
            f"{named}: transformers does not let its attention work over pages; {WHAT_RUNS}"
        )
