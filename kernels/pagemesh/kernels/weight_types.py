"""What the matrices of a model are kept as.

``int8``: codes and one float32 scale for each output, weight = code * scale, where scale = the
largest magnitude / 127. Products read codes and compute in float32.
"""

from __future__ import annotations

from typing import Literal, get_args

WeightType = Literal["float32", "int8"]
WEIGHT_TYPES: tuple[WeightType, ...] = get_args(WeightType)
"""In the native library's order (``PmWeightType``)."""
