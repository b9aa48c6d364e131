"""The step thread. The event loop hands it work and is told the results, but never waits for it.

    loop --run(plan)--> [ one thread ] --on_steps(done), of the steps of the run--> loop

Between two steps of a run the thread asks nobody: a round trip through the event loop costs as
much as a step of a small model. Nor does it report more often than a reader can follow, since
everything done with a report, all the way to the client, takes CPU time from the next steps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagemesh.engine.cores import usable_cores
from pagemesh.engine.worker.plan import (
    NO_READERS,
    Ahead,
    Executor,
    Readers,
    StepPlan,
    StepResult,
    plan_after,
    revoked_row,
)
from pagemesh.engine.worker.turns import Turns
from pagemesh.engine.worker.watch import StepWatch
from pagemesh.kernels.dispatch import use_threads
from pagemesh.runtime.clock import Clock
from pagemesh.wire.errors import Gone, Stale
from pagemesh.wire.pager_messages import SessionOpened

_SOON_S = 0.5


@dataclass(frozen=True, slots=True)
class StepsDone:
    """Steps of one run have ended: plans, each with the result of one step or several.
    ``goes_on``: the next one has begun. ``readers``: as of the last one."""

    steps: tuple[tuple[StepPlan, StepResult], ...]
    goes_on: bool
    readers: Readers = NO_READERS


class PoolingExecutor(Executor, Protocol):
    """An executor that can be given a pool."""

    def run_on(self, plan: StepPlan, ahead: Ahead) -> StepResult:
        """Compute ``plan`` and as much of its run as ``ahead`` allows, at least one step."""
        ...

    def use_opened(self, opened: SessionOpened) -> None:
        """Map the pool that a pager named. Raises ``PagemeshError``."""
        ...

    def let_go_discarded(self) -> bool:
        """Unmap the pool in use if its pager has discarded it. Returns whether it has."""
        ...

    def close(self) -> None: ...


def bounded_threads(wanted: int) -> int:
    """How many threads a step may use: ``wanted``, or if that is 0, as many as the cores of this
    process or its CPU quota allow."""
    return wanted or usable_cores().thread_count


def revoked(plan: StepPlan) -> StepResult:
    """The result of a plan that was not computed."""
    return StepResult(plan.step, tuple(map(revoked_row, plan.rows)))


class Stepper:
    """To be made on the event loop that it reports to. It runs one plan at a time. A step that
    takes longer than ``step_us_max``, usually less (``StepWatch``), counts as hung."""

    def __init__(
        self,
        executor: PoolingExecutor,
        *,
        turns: Turns,
        step_us_max: int,
        on_steps: Callable[[StepsDone], None],
        on_crash: Callable[[BaseException], None],
        on_pool_missing: Callable[[SessionOpened], None],
        clock: Clock,
        stream_ms: int,
        on_pool: Callable[[SessionOpened], None] = lambda _opened: None,
    ) -> None:
        """``stream_ms``: steps of a run that end within this time after a report wait for the next
        report; the first step does not, since others may have waited for it. ``on_pool``: called
        on the loop once steps can run over a pool given to ``use_pool``."""
        self._executor = executor
        self._on_steps = on_steps
        self._on_crash = on_crash
        self._on_pool_missing = on_pool_missing
        self._on_pool = on_pool
        self._clock = clock
        self._stream_us = 1_000 * stream_ms
        self._pool_missing = False
        self._opened: SessionOpened | None = None
        """The pool in use. Only the step thread reads and writes this and ``_pool_missing``."""
        self._loop = asyncio.get_running_loop()
        self._end_run: NDArray[np.uint32] = np.zeros(1, np.uint32)
        """Not 0: begin no further step of the run. Native code reads it too."""
        self._turns = turns
        self._readers = NO_READERS
        self._watch = StepWatch(step_us_max)
        self._run_us_max = step_us_max // 4  # to the watch, all steps of one call are one
        self._begun, self._longest_us, self._computing = 0, 0, False
        self.is_closed = False
        # The number of threads is set per calling thread, so the step thread sets its own.
        self._thread = ThreadPoolExecutor(
            1, "pagemesh-step", initializer=use_threads, initargs=(turns.thread_count,)
        )

    def use_pool(self, opened: SessionOpened) -> None:
        """Map another pool, after the work handed over before and ahead of any later. If it is gone
        or was replaced, ``on_pool_missing`` is called on the loop, and rows are reported revoked
        until a pool is mapped: the one before must not be used for them."""
        self._hand_over(lambda: self._use(opened))

    def let_go_discarded(self) -> None:
        """After the running step, unmap the pool in use if its pager has discarded it. It then
        counts as missing, as in ``use_pool``."""
        self.end_run()
        self._hand_over(self._let_go_discarded)

    def run(self, plan: StepPlan) -> None:
        """Compute a plan and the rest of its run; ``on_steps`` is called on the loop."""
        self._end_run[0] = 0
        self._hand_over(lambda: self._run(plan))

    def is_hung(self) -> bool:
        """Whether the running step has hung, as far as one can tell. To be called regularly."""
        return self._watch.is_hung(
            self._begun, computing=self._computing, longest_us=self._longest_us,
            now_us=self._clock.now_us(),
        )  # fmt: skip

    def end_run(self) -> None:
        """Let no further step of the run begin."""
        self._end_run[0] = 1

    def stop(self) -> None:
        """Forget what is queued; no further step begins."""
        self.end_run()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        """Stop, wait for the running step, and unmap the pool. If this is cancelled, the step goes
        on, over a pool that stays mapped."""
        self.stop()
        await asyncio.to_thread(self._thread.shutdown, True)
        self._executor.close()
        self._turns.close()
        self.is_closed = True

    async def abandon(self) -> None:
        """Close if the step ends soon, as most do; otherwise leave it running and return."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SOON_S):
                await self.close()

    def _use(self, opened: SessionOpened) -> None:
        try:
            self._executor.use_opened(opened)
        except (Gone, Stale):
            self._pool_missing = True
            self._loop.call_soon_threadsafe(self._on_pool_missing, opened)
        else:
            self._pool_missing, self._opened = False, opened
            self._loop.call_soon_threadsafe(self._on_pool, opened)

    def _let_go_discarded(self) -> None:
        if self._executor.let_go_discarded():
            assert self._opened is not None
            self._pool_missing = True
            self._loop.call_soon_threadsafe(self._on_pool_missing, self._opened)

    def _run(self, first: StepPlan) -> None:
        plan: StepPlan | None = first
        steps: list[tuple[StepPlan, StepResult]] = []
        due_us = 0
        while plan is not None:
            result = revoked(plan) if self._pool_missing else self._compute(plan, due_us)
            steps.append((plan, result))
            plan = None if self._end_run[0] else plan_after(plan, result)
            now_us = self._clock.now_us()
            if plan is None or now_us >= due_us or self._turns.is_wanted():
                due_us = now_us + self._stream_us
                done = StepsDone(tuple(steps), plan is not None, self._readers)
                self._loop.call_soon_threadsafe(self._on_steps, done)
                steps.clear()

    def _compute(self, plan: StepPlan, due_us: int) -> StepResult:
        """Run a step when it is its turn, and those after it that begin before ``due_us``."""
        self._readers = self._turns.enter(plan.drawing_rows)
        self._begun += 1
        self._computing = True
        step_count = 0
        try:
            for_us = min(due_us - self._clock.now_us(), self._run_us_max)
            result = self._executor.run_on(
                plan, Ahead(for_us, self._end_run, self._turns.others_waiting())
            )
            if not any(row.revoked for row in result.rows):  # what was not computed took no time
                self._longest_us = max(self._longest_us, *result.took_us)
            step_count = len(result.took_us)
            return result
        finally:
            self._computing = False
            self._turns.leave(step_count)

    def _hand_over(self, work: Callable[[], None]) -> None:
        def on_thread(future: Future[None]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                self._loop.call_soon_threadsafe(self._on_crash, error)

        self._thread.submit(work).add_done_callback(on_thread)
