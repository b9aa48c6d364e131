"""``merge_states`` in plain torch."""

from __future__ import annotations

import torch


def merge_states(states: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    empty = torch.isneginf(lse)
    weights = torch.softmax(lse, dim=-1).masked_fill(empty.all(-1, keepdim=True), 0.0)
    kept = torch.where(empty.unsqueeze(-1), 0.0, states)
    return torch.einsum("rhs,rhsd->rhd", weights, kept)
