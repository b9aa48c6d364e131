"""``page_copy`` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from pagemesh.kernels.kv_pool import KvPool


def page_copy(pool: KvPool, copies: Sequence[tuple[int, int]]) -> None:
    pages = pool.memory.view(pool.page_count, pool.layout.page_bytes)
    for source, target in copies:
        pages[target] = pages[source]
