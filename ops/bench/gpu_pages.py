"""Kernels that write and copy pages on a GPU, and moving pages out of its memory and back."""

from __future__ import annotations

import os

import numpy as np
import torch
from numpy.typing import NDArray
from ops.bench.gpu_rig import (
    PAGE_SIZE,
    Item,
    Limits,
    Result,
    Rig,
    Tensor,
    difference,
    distance,
    share_wrong,
)

from pagemesh.engine.cuda.device import CudaMaker, SharedMaker
from pagemesh.engine.device_memory import MemoryMaker, PageMover
from pagemesh.kernels.kv_codes import decode
from pagemesh.kernels.layout import KV_DTYPES, KvDtype
from pagemesh.kernels.ops import KvPool
from pagemesh.wire.pool_memory import Direction, MovePages
from pagemesh.wire.tokens import pack_extents

_HEAD_DIM = 128


def page_items(rig: Rig) -> dict[str, Item]:
    """The items, by name."""
    found: dict[str, Item] = {}
    for dtype in KV_DTYPES:
        found[f"kv_write {dtype}"] = _kv_write(rig, dtype)
        found[f"rope_kv_write {dtype}"] = _rope_kv_write(rig, dtype, with_norms=False)
    found["rope_kv_write bfloat16 norms"] = _rope_kv_write(rig, "bfloat16", with_norms=True)
    found["page_copy"] = lambda best: _page_copy(rig, best)
    found["pages moved out of the pool and in"] = lambda _best: _moved(rig)
    return found


def _pool(rig: Rig, dtype: KvDtype) -> tuple[KvPool, Tensor]:
    """A pool, and some of its slots in random order."""
    pages, rows, kv_heads = rig.size(1024, 2), rig.size(8192, 4), rig.size(8, 2)
    pool = rig.pool(dtype, pages, kv_heads=kv_heads, head_dim=_HEAD_DIM)
    return pool, torch.randperm(pages * PAGE_SIZE, device=rig.device)[:rows]


def _kv_write(rig: Rig, dtype: KvDtype) -> Item:
    def run(best: Limits) -> Result:
        from pagemesh.kernels.kv_write import reference
        from pagemesh.kernels.kv_write.triton import kv_write

        pool, slots = _pool(rig, dtype)
        k, v = (
            rig.rows(len(slots), pool.layout.kv_heads, _HEAD_DIM, dtype=torch.float32)
            for _ in range(2)
        )
        kv_write(k, v, pool, 0, slots)
        # On the CPU: on a GPU, torch divides by a scalar by multiplying, which rounds differently.
        twin = KvPool(pool.layout, torch.zeros(pool.memory.shape, dtype=torch.uint8))
        reference.kv_write(k.cpu(), v.cpu(), twin, 0, slots.cpu())
        ms = rig.timed_ms(lambda: kv_write(k, v, pool, 0, slots))
        moved_bytes = len(slots) * pool.layout.token_bytes + k.nbytes + v.nbytes
        return Result(
            share_wrong(pool.memory.cpu(), twin.memory), 0.0, ms,
            moved_bytes / ms * 1e3 / best.bandwidth_bytes,
        )  # fmt: skip

    return run


def _rope_kv_write(rig: Rig, dtype: KvDtype, *, with_norms: bool) -> Item:
    """The kernel as the forward pass calls it: queries in place, K and V into pages."""

    def run(best: Limits) -> Result:
        from pagemesh.kernels.rope_kv_write import reference
        from pagemesh.kernels.rope_kv_write.triton import rope_kv_write

        pool, slots = _pool(rig, dtype)
        twin = KvPool(pool.layout, torch.zeros_like(pool.memory))
        rows = len(slots)
        kv_heads = pool.layout.kv_heads
        heads = 4 * kv_heads
        joined = rig.rows(rows, heads + 2 * kv_heads, _HEAD_DIM)
        expected = joined.float()
        turns = 100 * torch.rand(rows, _HEAD_DIM // 2, device=rig.device)
        angles = turns.cos(), turns.sin()
        norms = (rig.rows(_HEAD_DIM), rig.rows(_HEAD_DIM)) if with_norms else None
        rope_kv_write(joined, angles, pool, 0, slots, norms, 1e-6)
        reference.rope_kv_write(expected, angles, twin, 0, slots, norms, 1e-6)
        error = max(difference(joined, expected), *map(distance, _read(pool), _read(twin)))
        ms = rig.timed_ms(lambda: rope_kv_write(joined, angles, pool, 0, slots, norms, 1e-6))
        row_bytes = joined[0, 0].nbytes * (2 * heads + 2 * kv_heads)
        moved_bytes = rows * (row_bytes + pool.layout.token_bytes) + 2 * turns.nbytes
        return Result(error, 0.01, ms, moved_bytes / ms * 1e3 / best.bandwidth_bytes)

    return run


def _read(pool: KvPool) -> tuple[Tensor, Tensor]:
    """K as [pages, heads, slots, dimensions], and V."""
    scaled = pool.layout.is_scaled
    return (
        decode(pool.keys(0).transpose(2, 3), pool.key_scales(0) if scaled else None),
        decode(pool.values(0), pool.value_scales(0) if scaled else None),
    )


def _page_copy(rig: Rig, best: Limits) -> Result:
    from pagemesh.kernels.page_copy.triton import page_copy

    half = rig.size(64, 3)
    layers = rig.size(32, 1)
    pool = rig.pool("bfloat16", 2 * half, kv_heads=8, head_dim=_HEAD_DIM, layers=layers)
    pool.memory.random_()
    copies = [(page, page + half) for page in range(half)]
    page_copy(pool, copies)
    pages = pool.memory.view(2 * half, -1)
    wrong = share_wrong(pages[half:], pages[:half])
    ms = rig.timed_ms(lambda: page_copy(pool, copies), captured=False)
    return Result(wrong, 0.0, ms, pool.memory.nbytes / ms * 1e3 / best.bandwidth_bytes)


def _moved(rig: Rig) -> Result:
    """Move 64 pages of 1 MiB, every fourth one of a pool, to host memory and from there to other
    pages; compared with torch's copy of as many bytes."""
    maker: MemoryMaker = SharedMaker() if rig.is_trial else CudaMaker(torch.device("cuda", 0))
    count, page_bytes = rig.size(256, 8), rig.size(1 << 20, 4096)
    pages = np.arange(0, count, 4, dtype=np.uint32)
    size, taken_bytes = count * page_bytes, len(pages) * page_bytes
    memory, staging = maker.make(size), os.memfd_create("pagemesh-bench")
    os.ftruncate(staging, taken_bytes)
    mapped, mover = maker.map(memory, size), PageMover(maker)
    pool = mapped.bytes[:size].view(count, page_bytes)
    pool[::4] = torch.randint(
        0, 256, (len(pages), page_bytes), dtype=torch.uint8, device=pool.device
    )

    tables: dict[Direction, NDArray[np.uint32]] = {"out": pages, "in": pages + 1}

    def move() -> None:
        for direction, table in tables.items():
            message = MovePages(
                direction=direction, pool_incarnation=1, size_bytes=size, page_bytes=page_bytes,
                extents=pack_extents(table),
            )  # fmt: skip
            mover.move(message, memory, staging)

    time_ms = rig.timed_ms(move, captured=False)
    error = share_wrong(pool[1::4], pool[::4])
    beside_ms = rig.timed_ms(lambda: pool[::4].cpu().to(pool.device), captured=False)
    mover.close()
    mapped.close()
    for descriptor in (memory, staging):
        os.close(descriptor)
    return Result(error, 0.0, time_ms, beside_ms=beside_ms)
