"""Supervision: restart with pauses, up to a limit, but never for a wrong setting."""

from __future__ import annotations

import asyncio

import pytest

from pagemesh.runtime.clock import ManualClock
from pagemesh.runtime.supervise import CrashLimit, CrashLoop, Ticks, every, supervise
from pagemesh.wire.errors import ConfigError


async def test_a_life_that_returns_is_not_restarted() -> None:
    lives = []

    async def live() -> None:
        lives.append(1)

    await supervise("x", live)
    assert lives == [1]


async def test_a_crash_restarts_until_the_limit_within_the_window() -> None:
    lives = []

    async def live() -> None:
        lives.append(1)
        raise RuntimeError("planned")

    with pytest.raises(CrashLoop, match="x crashed 4 times") as caught:
        await supervise("x", live, limit=CrashLimit(crash_count_max=4, pause_ms=0))
    assert len(lives) == 4
    assert isinstance(caught.value.__cause__, RuntimeError)


async def test_crashes_that_are_far_apart_do_not_add_up() -> None:
    clock = ManualClock()
    lives = []

    async def live() -> None:
        lives.append(1)
        clock.advance_ms(1_000)
        if len(lives) < 20:
            raise RuntimeError("planned")

    limit = CrashLimit(crash_count_max=3, window_ms=1_500, pause_ms=0)
    await supervise("x", live, limit=limit, clock=clock)
    assert len(lives) == 20


async def test_a_wrong_setting_is_not_tried_again() -> None:
    lives = []

    async def live() -> None:
        lives.append(1)
        raise ConfigError("PAGEMESH_X is wrong")

    with pytest.raises(ConfigError):
        await supervise("x", live)
    assert lives == [1]


async def test_a_cancelled_life_is_not_restarted() -> None:
    lives = []

    async def live() -> None:
        lives.append(1)
        await asyncio.Event().wait()

    task = asyncio.create_task(supervise("x", live))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lives == [1]


async def test_periods_missed_by_a_busy_loop_are_skipped() -> None:
    import time

    calls: list[float] = []
    task = asyncio.create_task(every(20, lambda: calls.append(time.monotonic())))
    await asyncio.sleep(0.03)
    time.sleep(0.2)  # noqa: ASYNC251  (the stall is what is tested)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert 2 <= len(calls) <= 6


async def test_a_tick_comes_when_patience_is_over_and_sooner_when_there_is_less_of_it() -> None:
    ticked, patience_ms = asyncio.Event(), 60_000.0
    ticks = Ticks(lambda: patience_ms, ticked.set)
    ticks.start()
    ticks.stir()
    await asyncio.sleep(0.02)
    assert not ticked.is_set()
    patience_ms = 5.0
    ticks.stir()
    await asyncio.wait_for(ticked.wait(), 5.0)
    ticks.stop()


async def test_ticks_go_on_until_they_are_stopped_from_within_at_the_latest() -> None:
    count = 0

    def act() -> None:
        nonlocal count
        count += 1
        if count == 3:
            ticks.stop()

    ticks = Ticks(lambda: 0.0, act)
    ticks.start()
    await asyncio.sleep(0.1)
    assert count == 3
    ticks.stir()
    await asyncio.sleep(0.02)
    assert count == 3
