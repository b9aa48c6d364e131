"""Weights in the order in which the kernel reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagemesh.kernels.dispatch import is_native, native

PANEL = 16


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight ``[n, k]`` as float32 ``panels`` ``[ceil(n / 16), k, 16]``; ``bias`` is float32
    ``[n]`` or empty. ``panels`` may lie in memory shared between processes."""

    n: int
    k: int
    panels: torch.Tensor
    bias: torch.Tensor

    def __post_init__(self) -> None:
        shape = packed_shape(self.n, self.k)
        if tuple(self.panels.shape) != shape or not self.panels.is_contiguous():
            raise ValueError(f"panels: expected {shape}, got {tuple(self.panels.shape)}")
        if self.panels.dtype is not torch.float32 or self.bias.dtype is not torch.float32:
            raise ValueError("panels and bias are float32")
        if self.bias.shape not in {(0,), (self.n,)} or not self.bias.is_contiguous():
            raise ValueError(f"bias: expected [{self.n}] or [0], got {list(self.bias.shape)}")

    @property
    def has_bias(self) -> bool:
        return self.bias.shape[0] > 0


def packed_shape(n: int, k: int) -> tuple[int, int, int]:
    """Shape of the panels of a weight ``[n, k]``."""
    return (-(-n // PANEL), k, PANEL)


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> PackedLinear:
    """Pack ``weight`` ``[n, k]`` (any float dtype), into ``out`` when it is given.

    Weights that are multiplied with the same input (q, k and v; gate and up) are best joined
    along ``n`` first. Raises ``ValueError`` on a wrong shape.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [n, k], got {list(weight.shape)}")
    n, k = weight.shape
    shape = packed_shape(n, k)
    panels = torch.empty(shape, dtype=torch.float32) if out is None else out
    plain_bias = torch.empty(0) if bias is None else bias.detach().float().contiguous()
    packed = PackedLinear(n, k, panels, plain_bias)
    plain = weight.detach().float()
    if is_native() and (k <= 1 or plain.stride(1) == 1):
        native().pm_linear_pack(plain.data_ptr(), plain.stride(0), panels.data_ptr(), n, k)
        return packed
    padded = torch.zeros((shape[0] * PANEL, k))
    padded[:n] = plain
    panels.copy_(padded.view(shape[0], PANEL, k).transpose(1, 2))
    return packed


def unpack_linear(packed: PackedLinear) -> torch.Tensor:
    """The weight ``[n, k]`` that was packed, as a copy."""
    return packed.panels.transpose(1, 2).reshape(-1, packed.k)[: packed.n].contiguous()
