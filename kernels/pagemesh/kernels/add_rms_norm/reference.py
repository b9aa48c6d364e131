"""``add_rms_norm`` in plain torch."""

from __future__ import annotations

import torch

from pagemesh.kernels.rms_norm import reference


def add_rms_norm(
    stream: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    total = stream.float() + addend.float()
    stream.copy_(total)
    return reference.rms_norm(total, weight.float(), epsilon).to(stream.dtype)
