"""``linear`` through the native library."""

from __future__ import annotations

import torch

from pagemesh.kernels.dispatch import native, threads
from pagemesh.kernels.linear.packed import PackedLinear
from pagemesh.kernels.weight_types import WEIGHT_TYPES


def linear(
    x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, *, row_invariant: bool
) -> None:
    native().pm_linear(
        x.data_ptr(),
        x.stride(0),
        packed.panels.data_ptr(),
        WEIGHT_TYPES.index(packed.weight_type),
        packed.bias.data_ptr() if packed.has_bias else None,
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        packed.n,
        packed.k,
        row_invariant,
        threads(),
    )
