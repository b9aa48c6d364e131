"""How K and V are encoded in a pool, in plain torch: as codes, and for some dtypes scales.

float32, float16, bfloat16   the values, rounded to nearest, ties to even; infinite if too large
int8, e4m3                   value = code * scale, one scale for the last dimension:
                             scale = largest magnitude / ``CODE_MAX``, then rounded likewise

Symmetric: zero is always zero. If a value is infinite or NaN, the scale is NaN and the codes are 0,
so that it shows instead of being clipped.
"""

from __future__ import annotations

import torch

from pagemesh.kernels.layout import KvDtype

CODE_DTYPES: dict[KvDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
}
CODE_MAX: dict[KvDtype, float] = {"int8": 127.0, "e4m3": 448.0}


def encode(rows: torch.Tensor, dtype: KvDtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes (``CODE_DTYPES[dtype]``, the shape of ``rows``) and scales (float32, without the last
    dimension; None for a dtype without scales) of float32 ``rows``."""
    if dtype not in CODE_MAX:
        return rows.to(CODE_DTYPES[dtype]), None
    largest = rows.abs().amax(-1)
    scales = (largest / CODE_MAX[dtype]).masked_fill(~largest.isfinite(), float("nan"))
    usable = scales > 0
    divided = rows / torch.where(usable, scales, 1.0).unsqueeze(-1)
    bounded = divided.clamp(-CODE_MAX[dtype], CODE_MAX[dtype])
    rounded = bounded.round() if dtype == "int8" else bounded
    return rounded.masked_fill(~usable.unsqueeze(-1), 0.0).to(CODE_DTYPES[dtype]), scales


def decode(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """The float32 values of what ``encode`` returned."""
    values = codes.float()
    return values if scales is None else values * scales.unsqueeze(-1)
