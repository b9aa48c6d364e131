"""Which layers look back no farther than a window. Families say it in five ways:

layer_types                       a name for each layer (newer files)
attention_layers, attention_types global and local layers (GPT-Neo)
no_rope_layers, with its interval chunks in all other layers (Llama 4)
sliding_window_pattern            one layer of so many has none
max_window_layers                 the layers below have none (Qwen)
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemesh.cli.planning.families import FULL_LAYERS, WINDOW_LAYERS
from pagemesh.cli.planning.fields import Config, has_any, number
from pagemesh.wire.errors import ConfigError, shown_name


def read_windows(
    config: Config, family: str, layers: int, context: int, where: str
) -> tuple[int, int]:
    """How many layers have a window, and its length in tokens; ``context`` tokens are no window.
    Raises ``ConfigError``."""
    kinds, name = _layer_kinds(config, layers, where)
    if kinds:
        count = sum(kind in WINDOW_LAYERS for kind in kinds)
        window = min(number(config, (name,), where), context) if count else 0
        return count, window
    if config.get("sliding_window") is None:
        return 0, 0
    # Qwen has a switch, which is off if absent; other families have none.
    if not config.get("use_sliding_window", not family.startswith("qwen")):
        return 0, 0
    window = number(config, ("sliding_window",), where)
    if window >= context:
        return 0, 0
    if family.startswith("qwen"):
        below = config.get("max_window_layers", 28)
        return layers - (min(layers, below) if isinstance(below, int) and below > 0 else 0), window
    if config.get("sliding_window_pattern") is None:
        return layers, window
    return layers - layers // number(config, ("sliding_window_pattern",), where), window


def _layer_kinds(config: Config, layers: int, where: str) -> tuple[Sequence[object], str]:
    """The kind of each layer as in ``layer_types``, and the field of the window's length; no kinds
    if the model has none of the fields that list them."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        _check_length("layer_types", kinds, layers, where)
        unknown = sorted(set(map(str, kinds)) - WINDOW_LAYERS - FULL_LAYERS)
        if unknown:
            raise ConfigError(
                f"{where}: layers of type {shown_name(', '.join(unknown))} keep state that pages "
                "cannot hold"
            )
        chunked = "chunked_attention" in kinds
        return kinds, "attention_chunk_size" if chunked else "sliding_window"
    if config.get("attention_layers") or config.get("attention_types"):
        return _local_layers(config, layers, where), "window_size"
    if config.get("attention_chunk_size") is not None and has_any(
        config, ("no_rope_layers", "no_rope_layer_interval")
    ):
        return _chunked_layers(config, layers, where), "attention_chunk_size"
    return (), ""


def _local_layers(config: Config, layers: int, where: str) -> list[str]:
    """GPT-Neo's: a list, or parts of it that repeat, each with a count."""
    kinds = config.get("attention_layers") or _repeated(config.get("attention_types"), layers)
    if not isinstance(kinds, list):
        raise ConfigError(f"{where}: attention_layers or attention_types is no list of layers")
    _check_length("attention_types", kinds, layers, where)
    return ["sliding_attention" if kind == "local" else "full_attention" for kind in kinds]


def _repeated(parts: object, layers: int) -> list[object] | None:
    """``parts`` such as ``[[["global", "local"], 12]]``, written out; None for anything else, and
    for more than ``layers``."""
    kinds: list[object] = []
    for part in parts if isinstance(parts, list) else [None]:
        match part:
            case [list(names), int(count)] if 0 < len(names) * count <= layers:
                kinds += names * count
            case _:
                return None
    return kinds


def _chunked_layers(config: Config, layers: int, where: str) -> list[str]:
    """Llama 4's: layers with rotary positions look back within a chunk."""
    rotates = config.get("no_rope_layers")
    if not rotates:
        every = number(config, ("no_rope_layer_interval",), where)
        rotates = [(at + 1) % every for at in range(layers)]
    if not isinstance(rotates, list):
        raise ConfigError(f"{where}: no_rope_layers is no list of layers")
    _check_length("no_rope_layers", rotates, layers, where)
    return ["chunked_attention" if one else "full_attention" for one in rotates]


def _check_length(name: str, kinds: Sequence[object], layers: int, where: str) -> None:
    if len(kinds) != layers:
        raise ConfigError(f"{where}: {name} names {len(kinds)} of {layers} layers")
