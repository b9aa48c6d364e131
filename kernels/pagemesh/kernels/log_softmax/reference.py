"""``log_softmax`` in plain torch."""

from __future__ import annotations

import torch


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, dim=-1)
