"""What the matrices of a model are kept as.

``bfloat16``, ``float16``: half of the bytes; a product is the one with the float32 weights that
they stand for, to the bit.
``slim_bfloat16``: bfloat16 in twelve bits, of matrices that have few exponents.
``int8``: codes and one float32 scale for each output, weight = code * scale, where scale = the
largest magnitude / 127.

Products add up in float32, whatever they read. Where a model's weights were asked to be rounded,
what is multiplied with them is rounded as well, to bfloat16: machines have instructions for that.
"""

from __future__ import annotations

from typing import Literal, get_args

WeightType = Literal["float32", "int8", "bfloat16", "float16", "slim_bfloat16"]
WEIGHT_TYPES: tuple[WeightType, ...] = get_args(WeightType)
"""In the native library's order (``PmWeightType``)."""
AskedType = Literal["float32", "int8", "bfloat16"]
"""What a model can be asked to be kept as. ``float32``: its values as they are, in as few bytes as
that takes."""
ASKED_TYPES: tuple[AskedType, ...] = get_args(AskedType)


def rounds_rows(asked: AskedType) -> bool:
    """Whether products of a model that is kept so round their rows to bfloat16."""
    return asked != "float32"
