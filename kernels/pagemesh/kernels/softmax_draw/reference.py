"""``softmax_draw`` row by row."""

from __future__ import annotations

import math

import torch

SUM_BLOCK = 1024


def softmax_draw(
    x: torch.Tensor,
    rows: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    limits: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    count, width = len(rows), x.shape[1]
    columns = torch.zeros(count, dtype=torch.int64)
    sums = torch.empty((count, -(-width // SUM_BLOCK)), dtype=torch.float64)
    for index, row in enumerate(rows.tolist()):
        if not 0 <= row < len(x):
            raise IndexError(f"row {row} is not one of the {len(x)} there are")
        own = ((x[row] - x[row].max()) / temperatures[index]).exp()
        if limits is not None and bool(own.isfinite().all()):
            min_p, top_k, top_p = (float(limit[index]) for limit in limits)
            own = limited(own, min_p, int(top_k), top_p)
        if weights is not None:
            weights[index] = own
        blocks = [own[at : at + SUM_BLOCK].double() for at in range(0, width, SUM_BLOCK)]
        sums[index] = torch.stack([block.sum() for block in blocks])
        columns[index] = _invert(blocks, sums[index], float(uniforms[index]))
    return columns, sums


def limited(weights: torch.Tensor, min_p: float, top_k: int, top_p: float) -> torch.Tensor:
    """``weights`` ([width], the highest is 1) with 0 for those that the limits exclude."""
    falling, columns = weights.sort(descending=True, stable=True)
    kept = falling >= min_p
    if top_k > 0:
        kept[top_k:] = False
    left = torch.where(kept, falling, 0.0).double()
    if top_p < 1.0:
        kept &= left.cumsum(0) - left < top_p * left.sum()
    kept[0] = True
    return torch.where(torch.zeros_like(kept).scatter(0, columns, kept), weights, 0.0)


def _invert(blocks: list[torch.Tensor], sums: torch.Tensor, uniform: float) -> int:
    edges = sums.cumsum(0)
    whole = float(edges[-1])
    if not math.isfinite(whole):
        return 0
    # Stays below the whole sum, even if a uniform just below 1 makes the product round up to it.
    target = min(uniform * whole, math.nextafter(whole, 0.0))
    block = int((edges <= target).sum())
    below = float(edges[block - 1]) if block else 0.0
    beyond = (below + blocks[block].cumsum(0) > target).nonzero()
    # If the two ways of summing round differently, take the last column with a weight above 0.
    found = beyond[0] if len(beyond) else blocks[block].nonzero()[-1]
    return block * SUM_BLOCK + int(found)
