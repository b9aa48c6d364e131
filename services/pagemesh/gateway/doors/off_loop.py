"""Runs work on long texts off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

THREAD_BYTES_MIN = 16 << 10
"""Longer texts are processed on a thread, so that other requests are not held up."""
LARGE_BYTES_MIN = 1 << 20
_LARGE = ThreadPoolExecutor(1, thread_name_prefix="large-body")
T = TypeVar("T")


async def off_loop(
    size_bytes: int, work: Callable[[], T], *, thread_bytes_min: int = THREAD_BYTES_MIN
) -> T:
    """``work()``, on a thread when its input is long. Inputs of megabytes take turns on one thread
    of their own: eight of them kept all other threads busy, and so delayed all long bodies, for a
    minute."""
    if size_bytes < thread_bytes_min:
        return work()
    if size_bytes < LARGE_BYTES_MIN:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_LARGE, work)
