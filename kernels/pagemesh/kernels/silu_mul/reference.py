"""``silu_mul`` in plain torch."""

from __future__ import annotations

import torch


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
