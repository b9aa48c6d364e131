"""``quantise`` and ``dequantise`` in plain torch."""

from __future__ import annotations

import torch


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    top = 127.0 if dtype is torch.int8 else 448.0
    wide = x.float()
    scales = wide.abs().amax(-1) / top if x.shape[1] else wide.new_zeros(x.shape[0])
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    scaled = (wide * inverse.unsqueeze(1)).clamp(-top, top)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales


def dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return values.float() * scales.unsqueeze(1)
