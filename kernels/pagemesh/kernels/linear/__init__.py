"""``linear``: matrix product with a weight that was packed once.

    out[r, n] = sum over k of x[r, k] * weight[n, k]  + bias[n]

x       float32 [rows, K], rows contiguous (any row stride)
packed  ``PackedLinear``: float32, bfloat16, float16 or int8 [ceil(N / 16)][K][16], padding
        columns zero; or bfloat16 in twelve bits (``slim``), padding columns arbitrary
out     float32 [rows, N]; written, returned; allocated when not given

Native: each element is summed over k in one fixed order, so a row's result is the same to the last
bit whatever the tiling and the threads, and weights in half precision give the same bits as equal
float32 weights. With int8 weights the sum is over codes, and is then multiplied by the column's
scale. With ``packed.rounds_rows`` x is rounded to bfloat16 first; the rounded values are summed in
the same order, whether or not the machine has an instruction for two of them at a time. On machines
with matrix tiles (AMX) many rows are multiplied on tiles and few as vectors, which rounds
differently; ``row_invariant`` puts all on tiles, so that a row's result does not depend on how many
rows there are either. The packing in panels of sixteen columns is the one that BLIS (Van Zee and
van de Geijn, 2015) uses for operand B.
"""

from __future__ import annotations

import torch

from pagemesh.kernels.dispatch import is_native, rows_float32, rows_out
from pagemesh.kernels.linear import cpu, reference
from pagemesh.kernels.linear.packed import PackedLinear, pack_linear, packed_shape

__all__ = ["PackedLinear", "linear", "pack_linear", "packed_shape"]


def linear(
    x: torch.Tensor,
    packed: PackedLinear,
    out: torch.Tensor | None = None,
    *,
    row_invariant: bool = False,
) -> torch.Tensor:
    """``x`` times the packed weight; see the module. Raises ``ValueError`` on a wrong shape."""
    rows_float32(x, "x", packed.k)
    out = rows_out(out, x.shape[0], packed.n, like=x)
    if is_native():
        cpu.linear(x, packed, out, row_invariant=row_invariant)
    else:
        reference.linear(x, packed, out)
    return out
