"""``merge_states`` in plain torch."""

from __future__ import annotations

import torch


def merge_states(states: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    weights = torch.softmax(lse, dim=-1).nan_to_num(0.0)
    kept = torch.where(torch.isneginf(lse).unsqueeze(-1), 0.0, states)
    return torch.einsum("rhs,rhsd->rhd", weights, kept)
