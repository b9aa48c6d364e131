"""``merge_states`` on a GPU: one program per row and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemesh.kernels.triton_support import expect_device, expect_heads

_FEW, _MANY = 4, 16
"""Parts merged at a time."""


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["position"])
def _merge(
    states, lse, out, position, parts, head_dim, out_stride, block: tl.constexpr,
    parts_block: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = (row * tl.num_programs(1) + head) * parts
    count = parts
    if position is not None:
        if tl.load(lse + first) == float("inf"):  # context not split: the result is in out
            return
        count = tl.where(tl.load(position + row) < 0, 0, parts)
    d = tl.arange(0, block)
    top, total = float("-inf"), 0.0
    merged = tl.zeros([block], tl.float32)
    for start in range(0, count, parts_block):
        part = start + tl.arange(0, parts_block)
        own = tl.load(lse + first + part, mask=part < count, other=float("-inf"))
        higher = tl.maximum(top, tl.max(own, 0))
        # Minus infinity minus itself is NaN: until a part has positions, subtract 0 instead.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(own - base)
        old = tl.exp(top - base)
        kept = (own > float("-inf"))[:, None] & (d < head_dim)[None, :]
        at = (first + part)[:, None] * head_dim + d[None, :]
        state = tl.load(states + at, mask=kept, other=0.0)
        merged = merged * old + tl.sum(state * weight[:, None], 0)
        total = total * old + tl.sum(weight, 0)
        top = higher
    merged = merged / tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_stride + head * head_dim + d, merged, mask=d < head_dim)


def merge_states(
    states: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the package; ``out`` is float32 when it is not given. With a ``position`` (int32 [rows]),
    rows at a position below 0 have no states, and rows whose first ``lse`` is plus infinity have
    their result in ``out`` already. Raises ``ValueError``."""
    rows, heads, parts, head_dim = states.shape
    for name, given, shape in (("states", states, states.shape), ("lse", lse, states.shape[:3])):
        expect_device(name, given)
        if given.dtype is not torch.float32 or given.shape != shape or not given.is_contiguous():
            raise ValueError(
                f"{name}: expected contiguous float32 {list(shape)}, got {given.dtype} "
                f"{list(given.shape)}"
            )
    if out is None:
        out = torch.empty((rows, heads, head_dim), dtype=torch.float32, device=states.device)
    expect_heads("out", out, rows_count=rows, head_dim=head_dim)
    if out.numel():
        is_small = parts <= _FEW
        _merge[(rows, heads)](
            states, lse, out, position, parts, head_dim, out.stride(0),
            triton.next_power_of_2(head_dim), _FEW if is_small else _MANY,
            num_warps=1 if is_small else 4,
        )  # fmt: skip
    return out
