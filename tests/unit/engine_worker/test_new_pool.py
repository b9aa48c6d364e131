"""While another pool is being mapped, a worker has none."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import cast

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.actor import Surroundings, WorkerBehaviour
from pagemesh.engine.worker.core import WorkerCore
from pagemesh.engine.worker.spans import SequenceSpans
from pagemesh.engine.worker.stepper import PoolingExecutor
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.wire.pager_messages import SessionOpened


class SlowPools:
    """An executor that has a pool mapped when it is told to go on, once for each."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)

    def use_opened(self, _opened: SessionOpened) -> None:
        assert self.go_on.acquire(timeout=10.0)

    def close(self) -> None:
        pass


def opened(incarnation: int, page_count: int) -> SessionOpened:
    return SessionOpened(
        host="h", epoch=incarnation, pool_incarnation=incarnation, pool=0, pool_path="/p",
        page_count=page_count, session_ttl_ms=1_000, heartbeat_ms=500,
    )  # fmt: skip


async def test_steps_run_over_a_pool_made_anew_when_it_is_mapped_and_not_before() -> None:
    told: list[int] = []
    heard = asyncio.Event()

    def on_pool(page_count: int) -> None:
        told.append(page_count)
        heard.set()

    around = SimpleNamespace(
        clock=MonotonicClock(), turns=SimpleNamespace(thread_count=1, close=lambda: None),
        step_us_max=1, stream_ms=0, admit=lambda _: None, on_patience=lambda: None,
        on_pool=on_pool,
    )  # fmt: skip
    commands: list[ev.Command] = []
    core = SimpleNamespace(take=lambda _event, _now_ms: commands, go_on=lambda: (), ready=False)
    pools = SlowPools()
    behaviour = WorkerBehaviour(
        cast(Surroundings, around), cast(WorkerCore, core), cast(PoolingExecutor, pools),
        SequenceSpans("decode", "me", life_count_max=1),
    )  # fmt: skip

    async def until_told(page_count: int) -> None:
        while not told or told[-1] != page_count:
            heard.clear()
            await asyncio.wait_for(heard.wait(), 10.0)

    commands[:] = [ev.UsePool(opened(1, 100))]
    await behaviour.handle(ev.StepsFinished(()))
    assert told == [0]
    pools.go_on.release()
    await until_told(100)

    commands[:] = [ev.UsePool(opened(2, 200)), ev.UsePool(opened(3, 300))]
    await behaviour.handle(ev.StepsFinished(()))
    assert told[2:] == [0, 0]
    pools.go_on.release(2)
    await until_told(300)
    assert 200 not in told, "of a pool that is not the one to be used"
    await behaviour.end()
