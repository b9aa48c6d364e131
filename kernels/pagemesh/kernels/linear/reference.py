"""``linear`` in plain torch."""

from __future__ import annotations

import torch

from pagemesh.kernels.linear.packed import PackedLinear, unpack_linear


def linear(x: torch.Tensor, packed: PackedLinear, out: torch.Tensor) -> None:
    if packed.rounds_rows:
        x = x.bfloat16().float()
    bias = packed.bias if packed.has_bias else None
    out.copy_(torch.nn.functional.linear(x, unpack_linear(packed), bias))
