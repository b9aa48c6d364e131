"""How long a context is that YaRN stretches (Peng et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping

_TOKENS_MAX = 1 << 32


def stretched_tokens(given: int, rope: object) -> int:
    """``given`` is what a configuration says of positions, ``rope`` what it says of rotations. With
    YaRN the first may be as it was before, as in the configurations that Qwen documents; the
    longer of both counts. Rotations may differ by type of layer: the longest counts. What makes no
    sense stretches nothing: whoever rotates refuses it."""
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
    # Nothing compares with what is no number.
    if not (1 <= factor <= _TOKENS_MAX and 1 <= original <= _TOKENS_MAX):
        return given
    return max(given, min(int(factor * original), _TOKENS_MAX))
