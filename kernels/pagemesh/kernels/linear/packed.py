"""Weights in the order in which the kernel reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagemesh.kernels.dispatch import is_native, native
from pagemesh.kernels.linear import slim
from pagemesh.kernels.weight_types import WeightType

PANEL = 16
_SCALE_ROWS = 4
"""Rows of sixteen bytes that a panel's sixteen scales take."""
_DTYPES: dict[WeightType, torch.dtype] = {
    "float32": torch.float32, "int8": torch.int8, "bfloat16": torch.bfloat16,
    "float16": torch.float16, "slim_bfloat16": torch.uint8,
}  # fmt: skip
TYPE_OF: dict[torch.dtype, WeightType] = {dtype: name for name, dtype in _DTYPES.items()}
_HALVES: tuple[WeightType, ...] = ("bfloat16", "float16")
ROUNDING_TYPES: tuple[WeightType, ...] = ("bfloat16", "int8", "slim_bfloat16")
"""Types whose values bfloat16 holds exactly: products with bfloat16 are then exact in float32."""
_CODE_MAX = 127
_PANELS_AT_ONCE = 256
_VALUES_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight ``[n, k]`` as ``panels``; ``bias`` is float32 ``[n]`` or empty. ``panels`` may
    lie in memory shared between processes.

    float32, bfloat16, float16   [ceil(n / 16), k, 16]
    int8   [ceil(n / 16), k + 4, 16]: the last four rows are the bytes of 16 float32 scales
    slim_bfloat16   bytes, [ceil(n / 16), slim.panel_bytes(k)]

    With ``rounds_rows``, for ``ROUNDING_TYPES`` only, the rows that it is multiplied with are
    rounded to bfloat16, to the nearest, ties to even.
    """

    n: int
    k: int
    panels: torch.Tensor
    bias: torch.Tensor
    rounds_rows: bool = False

    def __post_init__(self) -> None:
        if self.panels.dtype not in TYPE_OF or self.bias.dtype is not torch.float32:
            raise ValueError(f"panels are {', '.join(_DTYPES)}, and bias is float32")
        if min(self.n, self.k) < 1:
            raise ValueError(f"a matrix of {self.n} x {self.k} has nothing to multiply with")
        shape = packed_shape(self.n, self.k, self.weight_type)
        if tuple(self.panels.shape) != shape or not self.panels.is_contiguous():
            raise ValueError(f"panels: expected {shape}, got {tuple(self.panels.shape)}")
        if self.bias.shape not in {(0,), (self.n,)} or not self.bias.is_contiguous():
            raise ValueError(f"bias: expected [{self.n}] or [0], got {list(self.bias.shape)}")
        if self.rounds_rows and self.weight_type not in ROUNDING_TYPES:
            types = ", ".join(ROUNDING_TYPES)
            raise ValueError(f"rounds_rows: expected {types} panels, got {self.weight_type}")

    @property
    def has_bias(self) -> bool:
        return self.bias.shape[0] > 0

    @property
    def weight_type(self) -> WeightType:
        return TYPE_OF[self.panels.dtype]


def packed_shape(n: int, k: int, weight_type: WeightType = "float32") -> tuple[int, ...]:
    """Shape of the panels of a weight ``[n, k]``."""
    if weight_type == "slim_bfloat16":
        return (-(-n // PANEL), slim.panel_bytes(k))
    return (-(-n // PANEL), k + (_SCALE_ROWS if weight_type == "int8" else 0), PANEL)


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    weight_type: WeightType = "float32",
    rounds_rows: bool = False,
) -> PackedLinear:
    """Pack ``weight`` ``[n, k]`` (any float dtype) as ``weight_type``, rounded to the nearest
    where that has fewer bits; into ``out`` when it is given.

    Weights that are multiplied with the same input (q, k and v; gate and up) are best joined
    along ``n`` first. Raises ``ValueError`` on a wrong shape, and where ``slim_bfloat16`` cannot
    hold it (``slim.fits``).
    """
    if weight.dim() != 2:
        raise ValueError(f"weight: expected [n, k], got {list(weight.shape)}")
    n, k = weight.shape
    shape = packed_shape(n, k, weight_type)
    panels = torch.empty(shape, dtype=_DTYPES[weight_type]) if out is None else out
    plain_bias = torch.empty(0) if bias is None else bias.detach().float().contiguous()
    packed = PackedLinear(n, k, panels, plain_bias, rounds_rows)
    if packed.weight_type == "int8":
        _pack_codes(weight.detach(), panels)
        return packed
    if packed.weight_type == "slim_bfloat16":
        slim.pack(weight.detach(), panels)
        return packed
    plain = weight.detach().to(panels.dtype)
    if is_native() and (k <= 1 or plain.stride(1) == 1):
        native().pm_linear_pack(
            plain.data_ptr(), plain.stride(0), panels.data_ptr(), n, k, panels.itemsize
        )
    else:
        panels.copy_(_in_panels(plain))
    return packed


def exact_type(*weights: torch.Tensor) -> WeightType:
    """The smallest type that holds every value of ``weights`` (any float dtype) exactly."""
    for half in _HALVES:
        if all(_has_all(_DTYPES[half], weight) for weight in weights):
            return half
    return "float32"


def _has_all(half: torch.dtype, weight: torch.Tensor) -> bool:
    """Compares some values at a time: the first ones nearly always decide."""
    if weight.dtype is half:
        return True
    parts = torch.split(weight.detach().reshape(-1), _VALUES_AT_ONCE)
    return all(torch.equal(part.to(half).to(torch.float64), part.double()) for part in parts)


def _in_panels(plain: torch.Tensor) -> torch.Tensor:
    """``plain`` [n, k] as [panels, k, 16]; columns beyond it are zero."""
    missing = -plain.shape[0] % PANEL
    padded = torch.nn.functional.pad(plain, (0, 0, 0, missing))
    return padded.view(-1, PANEL, plain.shape[1]).transpose(1, 2)


def _pack_codes(weight: torch.Tensor, panels: torch.Tensor) -> None:
    """Packs some panels at a time, since intermediate results take memory as well."""
    k = weight.shape[1]
    for first in range(0, panels.shape[0], _PANELS_AT_ONCE):
        part = panels[first : first + _PANELS_AT_ONCE]
        rows = weight[first * PANEL : (first + _PANELS_AT_ONCE) * PANEL].float()
        codes, scales = quantised(rows)
        part[:, :k] = _in_panels(codes)
        padded = torch.nn.functional.pad(scales, (0, -len(scales) % PANEL))
        part[:, k:] = padded.view(torch.int8).view(len(part), _SCALE_ROWS, PANEL)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [n, k] and scales float32 [n] of ``weight``, float32 [n, k].

    Symmetric, to the nearest code, ties to even. A row with an infinite value or a NaN has codes of
    zero and a scale with which every product is NaN.
    """
    scales = weight.abs().amax(1) / _CODE_MAX
    codes = torch.round(weight / scales[:, None]).clamp(-_CODE_MAX, _CODE_MAX)
    is_finite = (scales > 0) & scales.isfinite()
    return torch.where(is_finite[:, None], codes, 0.0).to(torch.int8), scales


def unpack_linear(packed: PackedLinear) -> torch.Tensor:
    """The weight ``[n, k]`` that was packed, as a float32 copy; int8 codes are decoded."""
    if packed.weight_type == "slim_bfloat16":
        values = slim.unpack(packed.panels, packed.k)
    else:
        values = packed.panels[:, : packed.k]
    rows = values.transpose(1, 2).reshape(-1, packed.k).float()
    if packed.weight_type == "int8":
        scales = packed.panels[:, packed.k :].reshape(-1).view(torch.float32)
        rows *= scales[:, None]
    return rows[: packed.n].contiguous()
