"""Work on long texts, kept from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

THREAD_BYTES_MIN = 16 << 10
"""Longer texts are worked on by a thread, so that others are not held up."""
LARGE_BYTES_MIN = 1 << 20
_LARGE = ThreadPoolExecutor(1, thread_name_prefix="large-body")
T = TypeVar("T")


async def off_loop(
    size_bytes: int, work: Callable[[], T], *, thread_bytes_min: int = THREAD_BYTES_MIN
) -> T:
    """``work()``, on a thread when its input is long. Those of megabytes take turns on one of
    their own: eight of them kept every thread, and with it all long bodies, for a minute."""
    if size_bytes < thread_bytes_min:
        return work()
    if size_bytes < LARGE_BYTES_MIN:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_LARGE, work)
