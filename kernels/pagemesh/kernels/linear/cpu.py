"""``linear`` through the native library."""

from __future__ import annotations

import torch

from pagemesh.kernels.dispatch import native, threads
from pagemesh.kernels.linear.packed import PackedLinear


def linear(x: torch.Tensor, packed: PackedLinear, out: torch.Tensor) -> None:
    native().pm_linear(
        x.data_ptr(),
        x.stride(0),
        packed.panels.data_ptr(),
        packed.bias.data_ptr() if packed.has_bias else None,
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        packed.n,
        packed.k,
        threads(),
    )
