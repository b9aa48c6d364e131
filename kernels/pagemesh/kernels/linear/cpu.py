"""``linear`` through the native library."""

from __future__ import annotations

import ctypes

import torch

from pagemesh.kernels.dispatch import native, threads
from pagemesh.kernels.linear.packed import PackedLinear
from pagemesh.kernels.native.library import MatrixStruct
from pagemesh.kernels.weight_types import WEIGHT_TYPES


def linear(
    x: torch.Tensor, packed: PackedLinear, out: torch.Tensor, *, row_invariant: bool
) -> None:
    native().pm_linear(
        x.data_ptr(),
        x.stride(0),
        ctypes.byref(matrix_struct(packed)),
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        row_invariant,
        threads(),
    )


def matrix_struct(packed: PackedLinear) -> MatrixStruct:
    """``packed`` as the library takes it; the struct does not keep the tensors alive."""
    return MatrixStruct(
        packed.panels.data_ptr(),
        packed.bias.data_ptr() if packed.has_bias else None,
        packed.n,
        packed.k,
        WEIGHT_TYPES.index(packed.weight_type),
        packed.rounds_rows,
    )
