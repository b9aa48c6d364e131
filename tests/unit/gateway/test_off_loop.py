"""Where the gateway works on bodies."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from functools import partial

import pytest

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


async def test_owners_of_long_bodies_take_turns_and_what_nobody_wants_is_left_out() -> None:
    begun, gate, done = threading.Event(), threading.Event(), list[str]()

    def hold() -> None:
        begun.set()
        gate.wait(10)

    tasks = [asyncio.create_task(off_loop(LARGE_BYTES_MIN, hold, owner="a"))]
    await asyncio.to_thread(begun.wait, 10)
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        work = off_loop(LARGE_BYTES_MIN, partial(done.append, name), owner=name[0])
        tasks.append(asyncio.create_task(work))
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == ["a1", "b1", "c1", "a3", "b2"]


async def test_a_long_body_that_cannot_be_worked_on_says_so_and_holds_up_no_other() -> None:
    with pytest.raises(ZeroDivisionError):
        await off_loop(LARGE_BYTES_MIN, lambda: 1 // 0)
    assert await off_loop(LARGE_BYTES_MIN, lambda: "done") == "done"


class _Body:
    """Large, and gone when nobody wants it any more."""

    def fail(self) -> None:
        raise ValueError

    def take(self) -> str:
        return "done"


async def test_no_body_outlives_its_job_whether_it_failed_or_was_cancelled() -> None:
    begun, gate = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait(10)

    gc.disable()
    try:
        failing = _Body()
        kept = [weakref.ref(failing)]
        with pytest.raises(ValueError):
            await off_loop(LARGE_BYTES_MIN, failing.fail)
        del failing
        first = asyncio.create_task(off_loop(LARGE_BYTES_MIN, hold))
        await asyncio.to_thread(begun.wait, 10)
        waiting = _Body()
        kept.append(weakref.ref(waiting))
        second = asyncio.create_task(off_loop(LARGE_BYTES_MIN, waiting.take))
        await asyncio.sleep(0)
        del waiting
        second.cancel()
        await asyncio.wait([second])
        del second
        await asyncio.sleep(0)
        assert [one() for one in kept] == [None, None], "while the first is still under way"
    finally:
        gate.set()
        gc.enable()
    await first
