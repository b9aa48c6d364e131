"""``page_copy``: whole pages, every layer, to other pages of the pool (copy on write).

pool    ``KvPool``; pages ``targets`` are MUTATED
copies  pairs (source page, target page); no target is also a source or another's target

Raises ``IndexError`` for a page outside of the pool, before any write.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagemesh.kernels.dispatch import is_native, native, threads
from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.page_copy import reference


def page_copy(pool: KvPool, copies: Sequence[tuple[int, int]]) -> None:
    """See the module. On the CPU; ``page_copy.triton`` has it for a GPU."""
    check_copies(pool, copies)
    if not copies:
        return
    if not is_native():
        reference.page_copy(pool, copies)
        return
    pairs = np.asarray(copies, np.uint32)
    sources, targets = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    native().pm_page_copy(
        pool.address, pool.layout.page_bytes, pool.page_count, sources.ctypes.data,
        targets.ctypes.data, len(copies), threads(),
    )  # fmt: skip


def check_copies(pool: KvPool, copies: Sequence[tuple[int, int]]) -> None:
    """Raises ``IndexError`` for a page outside of the pool."""
    wrong = [pair for pair in copies if not all(0 <= page < pool.page_count for page in pair)]
    if wrong:
        raise IndexError(f"copy {wrong[0]} is outside of a pool of {pool.page_count} pages")
