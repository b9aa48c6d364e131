"""bfloat16 weights in twelve bits, in the layout of ``native/slim_layout.h``.

A panel's head is 64 bytes: sixteen upper bytes of a bfloat16, by code, and the number of strays
(values whose upper byte has no code). Strays follow, eight bytes each: 16 * k + column, and the
bits of a float32.
"""

from __future__ import annotations

import torch

from pagemesh.kernels.dispatch import is_native, native, threads
from pagemesh.kernels.native.library import CpuLevel, cpu_level

DEPTH = 8
"""Values of k in a group."""
_PANEL, _LANES, _GROUP_BYTES, _HEAD_BYTES, _STRAY_BYTES = 16, 4, 192, 64, 8


def pays() -> bool:
    """Whether to keep weights this way on this machine: few rows are multiplied faster. Matrix
    tiles multiply bfloat16 as it is."""
    return is_native() and CpuLevel.PORTABLE < cpu_level() < CpuLevel.AMX


def panel_bytes(k: int) -> int:
    """The size of a panel with ``k`` values per column."""
    return _groups_at(k) + k // DEPTH * _GROUP_BYTES


def fits(weight: torch.Tensor) -> bool:
    """Whether ``weight``, bfloat16 values [n, k], can be kept this way, in fewer bytes: groups must
    be whole, and in each panel at most about one of 512 values may be a stray."""
    k = weight.shape[1]
    return panel_bytes(k) < 2 * _PANEL * k and _pack(weight, None)


def pack(weight: torch.Tensor, panels: torch.Tensor) -> None:
    """Pack ``weight``, bfloat16 values [n, k], into ``panels``. Raises ``ValueError`` when groups
    are not whole or there are too many strays."""
    if weight.shape[1] % DEPTH:
        raise ValueError(f"k: expected a multiple of {DEPTH}, got {weight.shape[1]}")
    if not _pack(weight, panels):
        raise ValueError("weight: expected few exponents, got too many for slim_bfloat16")


def _pack(weight: torch.Tensor, panels: torch.Tensor | None) -> bool:
    plain = weight.bfloat16().contiguous()
    to = None if panels is None else panels.data_ptr()
    return not native().pm_linear_pack_slim(
        plain.data_ptr(), plain.stride(0), to, *plain.shape, threads()
    )


def unpack(panels: torch.Tensor, k: int) -> torch.Tensor:
    """bfloat16 [panels, k, 16]."""
    count, groups, at = len(panels), k // DEPTH, _groups_at(k)
    data = panels[:, at:].view(count, groups, _GROUP_BYTES)
    lowers, codes = data[..., : 2 * 64], data[..., 2 * 64 :]
    halves = torch.stack([codes & 15, codes >> 4], 2).view(count, -1)
    uppers = panels[:, :16].gather(1, halves.long())
    words = uppers.to(torch.int16) << 8 | lowers.reshape(count, -1)
    # [panel, group and half, lane, pair of rows, column of the lane, row of the pair: last first]
    lanes = words.view(count, 2 * groups, _LANES, 2, _LANES, 2)
    values = lanes.flip(5).permute(0, 1, 3, 5, 2, 4).reshape(count, -1)
    strays = panels[:, _HEAD_BYTES:at].view(torch.int32).view(count, -1, 2)
    counts = panels[:, 16:20].view(torch.int32)
    panel, number = torch.nonzero(torch.arange(strays.shape[1]) < counts, as_tuple=True)
    places, bits = strays[panel, number].long().unbind(1)
    values[panel, places] = (bits >> 16).to(torch.int16)
    found: torch.Tensor = values.view(torch.bfloat16).view(count, k, _PANEL)
    return found


def _groups_at(k: int) -> int:
    return _HEAD_BYTES + -(-k // 256) * 8 * _STRAY_BYTES
