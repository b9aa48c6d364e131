"""``merge_states`` on a GPU: one program a row and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemesh.kernels.triton_support import expect_device, expect_heads

_PARTS = 16
"""Parts merged at a time."""


@triton.jit
def _merge(
    states, lse, out, parts, head_dim, out_stride, block: tl.constexpr, parts_block: tl.constexpr
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = (row * tl.num_programs(1) + head) * parts
    d = tl.arange(0, block)
    top, total = float("-inf"), 0.0
    merged = tl.zeros([block], tl.float32)
    for start in range(0, parts, parts_block):
        part = start + tl.arange(0, parts_block)
        own = tl.load(lse + first + part, mask=part < parts, other=float("-inf"))
        higher = tl.maximum(top, tl.max(own, 0))
        # Minus infinity less itself is no number: until there is a part, nothing weighs.
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
    states: torch.Tensor, lse: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See the package; ``out`` is float32 when it is not given. Raises ``ValueError``."""
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
        _merge[(rows, heads)](
            states, lse, out, parts, head_dim, out.stride(0), triton.next_power_of_2(head_dim),
            _PARTS, num_warps=4,
        )  # fmt: skip
    return out
