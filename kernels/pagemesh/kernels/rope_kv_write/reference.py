"""``rope_kv_write`` in plain torch."""

from __future__ import annotations

import torch

from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.kv_write import reference as kv_write_reference
from pagemesh.kernels.rms_norm import reference as rms_norm_reference
from pagemesh.kernels.rope import reference as rope_reference


def rope_kv_write(
    joined: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    pool: KvPool,
    layer: int,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 0.0,
) -> None:
    kv_heads = pool.layout.kv_heads
    heads = joined.shape[1] - 2 * kv_heads
    q, k, v = torch.split(joined.float(), [heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q = rms_norm_reference.rms_norm(q, norms[0].float(), epsilon)
        k = rms_norm_reference.rms_norm(k, norms[1].float(), epsilon)
    joined[:, :heads] = rope_reference.rope(q, *angles).to(joined.dtype)
    real = slots >= 0
    k = rope_reference.rope(k, *angles)
    kv_write_reference.kv_write(k[real], v[real], pool, layer, slots[real])
