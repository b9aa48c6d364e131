"""The types in which a model's matrices are kept.

``bfloat16``, ``float16``: half of the bytes; products are those with the equal float32 weights, to
the bit.
``slim_bfloat16``: bfloat16 in twelve bits, for matrices with few different exponents.
``int8``: codes and one float32 scale for each output, weight = code * scale, where scale = the
largest magnitude / 127.

Products are summed in float32, whatever type they read. If a model's weights were asked to be
rounded, the rows multiplied with them are rounded as well, to bfloat16, for which machines have
instructions.
"""

from __future__ import annotations

from typing import Literal, get_args

WeightType = Literal["float32", "int8", "bfloat16", "float16", "slim_bfloat16"]
WEIGHT_TYPES: tuple[WeightType, ...] = get_args(WeightType)
"""In the native library's order (``PmWeightType``)."""
AskedType = Literal["float32", "int8", "bfloat16"]
"""Types in which a model's weights can be asked to be kept. ``float32``: their exact values, in as
few bytes as these take."""
ASKED_TYPES: tuple[AskedType, ...] = get_args(AskedType)


def rounds_rows(asked: AskedType) -> bool:
    """Whether products of a model kept as ``asked`` round their rows to bfloat16."""
    return asked != "float32"
