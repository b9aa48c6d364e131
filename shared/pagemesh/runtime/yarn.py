"""The length of a context that YaRN stretches (Peng et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping

_TOKENS_MAX = 1 << 32


def stretched_tokens(given: int, rope: object) -> int:
    """The context length in tokens. ``given`` is a configuration's number of positions, ``rope``
    its rotary parameters. With YaRN, ``given`` may be the length before stretching, as in the
    configurations that Qwen documents; the longer of the two counts. Rotary parameters may differ
    by type of layer: the longest counts. Invalid ones are ignored here; the code that applies them
    refuses them."""
    if not isinstance(rope, Mapping):
        return given
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    return max(_stretched(given, part) for part in nested or [rope])


def _stretched(given: int, rope: Mapping[object, object]) -> int:
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return given
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings") or given
    if not isinstance(factor, int | float) or not isinstance(original, int):
        return given
    # All comparisons with NaN are False.
    if not (1 <= factor <= _TOKENS_MAX and 1 <= original <= _TOKENS_MAX):
        return given
    return max(given, min(int(factor * original), _TOKENS_MAX))
