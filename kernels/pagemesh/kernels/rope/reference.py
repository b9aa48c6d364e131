"""``rope`` in plain torch."""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    half = cosine.shape[1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cosine.unsqueeze(1), sine.unsqueeze(1)
    return torch.cat([low * c - high * s, high * c + low * s, rest], dim=-1)
