"""While another pool is being mapped, a worker has none; nor while another is to be made."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.actor import (
    Input,
    PoolDiscarded,
    PoolRefused,
    Surroundings,
    WorkerBehaviour,
)
from pagemesh.engine.worker.core import WorkerCore
from pagemesh.engine.worker.spans import SequenceSpans
from pagemesh.engine.worker.stepper import PoolingExecutor
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.wire.errors import Busy, Fault, NoCapacity
from pagemesh.wire.pager_messages import OpenSession, PoolSpec, SessionOpened


class SlowPools:
    """An executor that has a pool mapped when it is told to go on, once for each."""

    def __init__(self) -> None:
        self.go_on = threading.Semaphore(0)

    def use_opened(self, _opened: SessionOpened) -> None:
        assert self.go_on.acquire(timeout=10.0)

    def let_go_discarded(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Refusing:
    """A bus on which every call is refused."""

    together = contextlib.nullcontext

    def __init__(self, fault: Fault | None) -> None:
        self.fault = fault

    def ask(self, *_: Any, **__: Any) -> Any:
        assert self.fault is not None
        raise self.fault


def opened(incarnation: int, page_count: int) -> SessionOpened:
    return SessionOpened(
        host="h", epoch=incarnation, pool_incarnation=incarnation, pool=0, pool_path="/p",
        page_count=page_count, session_ttl_ms=1_000, heartbeat_ms=500,
    )  # fmt: skip


@dataclass
class Worker:
    """The actor of one whose core wants ``commands`` whatever it hears."""

    behaviour: WorkerBehaviour
    commands: list[ev.Command]
    admitted: list[Input]

    async def wants(self, *commands: ev.Command) -> None:
        self.commands[:] = commands
        await self.behaviour.handle(ev.StepsFinished(()))


def make_worker(
    pools: SlowPools, on_pool: Callable[[int], None], fault: Fault | None = None
) -> Worker:
    """``fault``: what the pager answers."""
    admitted: list[Input] = []
    around = SimpleNamespace(
        clock=MonotonicClock(), grammars=None,
        turns=SimpleNamespace(thread_count=1, close=lambda: None),
        step_us_max=1, stream_ms=0, admit=admitted.append, on_patience=lambda: None,
        on_pool=on_pool, host="h", bus=Refusing(fault),
    )  # fmt: skip
    commands: list[ev.Command] = []
    core = SimpleNamespace(take=lambda _event, _now_ms: commands, go_on=lambda: (), ready=False)
    behaviour = WorkerBehaviour(
        cast(Surroundings, around), cast(WorkerCore, core), cast(PoolingExecutor, pools),
        SequenceSpans("decode", "me", life_count_max=1),
    )  # fmt: skip
    return Worker(behaviour, commands, admitted)


class Told:
    """How many pages steps can run over, as it is told."""

    def __init__(self) -> None:
        self.page_counts: list[int] = []
        self._news = asyncio.Event()

    def __call__(self, page_count: int) -> None:
        self.page_counts.append(page_count)
        self._news.set()

    async def until(self, page_count: int) -> None:
        while not self.page_counts or self.page_counts[-1] != page_count:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 10.0)


async def test_steps_run_over_a_pool_made_anew_when_it_is_mapped_and_not_before() -> None:
    told, pools = Told(), SlowPools()
    worker = make_worker(pools, told)
    await worker.wants(ev.UsePool(opened(1, 100)))
    assert told.page_counts == [0]
    pools.go_on.release()
    await told.until(100)

    await worker.wants(ev.UsePool(opened(2, 200)), ev.UsePool(opened(3, 300)))
    assert told.page_counts[2:] == [0, 0]
    pools.go_on.release(2)
    await told.until(300)
    assert 200 not in told.page_counts, "of a pool that is not the one to be used"
    await worker.behaviour.end()


async def test_a_pool_that_was_discarded_is_let_go_and_asked_for_anew() -> None:
    told, pools = Told(), SlowPools()
    worker = make_worker(pools, told)
    await worker.wants(ev.UsePool(opened(1, 100)))
    pools.go_on.release()
    await told.until(100)
    await worker.behaviour.handle(PoolDiscarded())
    await told.until(0)
    assert worker.admitted == [ev.PoolMissing(1)]
    await worker.behaviour.end()


@pytest.mark.parametrize("had_one", [False, True])
@pytest.mark.parametrize("fault", [NoCapacity("full"), Busy("full", retry_after_ms=500)])
async def test_only_who_never_had_a_pool_ends_since_there_can_be_none(
    fault: Fault, had_one: bool
) -> None:
    """The settings were right once, and whoever fills the device may leave."""
    told, pools = Told(), SlowPools()
    worker = make_worker(pools, told, fault)
    if had_one:
        await worker.wants(ev.UsePool(opened(1, 100)))
        pools.go_on.release()
        await told.until(100)
    asks = OpenSession(
        worker="me", incarnation=1, role="decode", lock_name="lock",
        pool=PoolSpec(layout_digest=bytes(32), page_size=16, page_bytes=64),
    )  # fmt: skip
    with capture_logs() as logs:
        for call in range(3):
            await worker.wants(ev.CallPager(call, asks, 10))
    refused = [one for one in worker.admitted if isinstance(one, PoolRefused)]
    answered = [one for one in worker.admitted if isinstance(one, ev.PagerAnswered)]
    is_final = isinstance(fault, NoCapacity)
    assert bool(refused) == (is_final and not had_one)
    assert len(answered) == 3, "the core asks again"
    told_of = [one["error"] for one in logs if one["event"] == "worker.pool_refused"]
    assert told_of == (["full"] if is_final and had_one else []), "once"
    await worker.behaviour.end()
