"""``linear``: matrix product with a weight that was packed once.

    out[r, n] = sum over k of x[r, k] * weight[n, k]  + bias[n]

x       float32 [rows, K], rows contiguous (any row stride)
packed  ``PackedLinear``: float32, bfloat16, float16 or int8 [ceil(N / 16)][K][16], padding
        columns zero; or bfloat16 in twelve bits (``slim``), padding columns anything
out     float32 [rows, N]; written, returned; allocated when not given

Native: an element's sum goes over k in one order, so a row's result is the same to the last bit
whatever the tiling and the threads, and weights in half precision give it the bits that the same
values give it in float32. Of int8 weights the sum is over codes, and what it comes to is
multiplied by the column's scale. With ``packed.rounds_rows`` x is rounded to bfloat16 first; the
sum is the chain that it is without, over the rounded values, whether the machine has an instruction
for two of them at a time or not. Where the machine has matrix tiles, many rows are multiplied on
them and few as vectors, which rounds otherwise; ``row_invariant`` does all on tiles, so that a
row's result does not depend on how many there are either. The packing in
panels of sixteen columns is the one BLIS (Van Zee and van de Geijn, 2015) uses for operand B.
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
