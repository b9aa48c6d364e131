"""Where the gateway works on bodies."""

from __future__ import annotations

import asyncio
import threading

from pagemesh.gateway.doors.off_loop import LARGE_BYTES_MIN, THREAD_BYTES_MIN, off_loop


async def test_bodies_of_megabytes_hold_up_no_shorter_one() -> None:
    gate = threading.Event()
    large = [asyncio.create_task(off_loop(LARGE_BYTES_MIN, gate.wait)) for _ in range(64)]
    await asyncio.sleep(0.1)
    try:
        async with asyncio.timeout(10):
            assert await off_loop(THREAD_BYTES_MIN, lambda: "done") == "done"
    finally:
        gate.set()
        await asyncio.gather(*large)
