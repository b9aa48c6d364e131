"""The thread that computes. The event loop hands it work and hears of the end; it never waits.

loop --run(plan)--> [ one thread ] --on_done(plan, result)--> loop
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

from pagemesh.engine.worker.plan import StepPlan, StepResult
from pagemesh.wire.pager_messages import SessionOpened

T = TypeVar("T")


class PoolingExecutor(Protocol):
    """``plan.Executor`` that can be given a pool."""

    def use_opened(self, opened: SessionOpened) -> None:
        """Map the pool that a pager named. Raises ``PagemeshError``."""
        ...

    def run(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


def bounded_threads(wanted: int) -> int:
    """How many threads a step may use: ``wanted``, or every core of this process for 0."""
    return wanted or len(os.sched_getaffinity(0))


class Stepper:
    """Use it as a context manager on the event loop it reports to."""

    def __init__(
        self,
        executor: PoolingExecutor,
        *,
        thread_count: int,
        on_done: Callable[[StepPlan, StepResult], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._executor = executor
        self._on_done = on_done
        self._on_crash = on_crash
        self._loop = asyncio.get_running_loop()
        # Torch's bound is per thread that asks, so the computing thread sets its own.
        self._thread = ThreadPoolExecutor(
            1, "pagemesh-step", torch.set_num_threads, (thread_count,)
        )

    def use_pool(self, opened: SessionOpened) -> None:
        """Map another pool, after what was handed over before and before what comes."""
        self._hand_over(lambda: self._executor.use_opened(opened), lambda _: None)

    def run(self, plan: StepPlan) -> None:
        """Compute a plan; ``on_done`` is called on the loop."""
        self._hand_over(
            lambda: self._executor.run(plan), lambda result: self._on_done(plan, result)
        )

    async def close(self) -> None:
        """Wait for the step that runs, forget what is queued, let the pool go."""
        await asyncio.to_thread(self._thread.shutdown, True, cancel_futures=True)
        self._executor.close()

    def _hand_over(self, work: Callable[[], T], on_result: Callable[[T], None]) -> None:
        def report(future: Future[T]) -> None:
            error = future.exception()
            if error is not None:
                self._on_crash(error)
            else:
                on_result(future.result())

        def on_thread(future: Future[T]) -> None:
            if not future.cancelled():
                self._loop.call_soon_threadsafe(report, future)

        self._thread.submit(work).add_done_callback(on_thread)
