"""The step thread: runs go on without the loop, and the loop is not told too often."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from pagemesh.engine.worker.plan import (
    Ahead,
    Drawn,
    RowResult,
    Sample,
    StepPlan,
    StepResult,
    StepRow,
    plan_after,
)
from pagemesh.engine.worker.stepper import Stepper, StepsDone
from pagemesh.engine.worker.turns import NoTurns, Turns
from pagemesh.runtime.clock import ManualClock
from pagemesh.wire.errors import Gone
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.pager_messages import SessionOpened
from pagemesh.wire.work_messages import Sampling

KEY = SequenceKey(request="1" * 32, attempt=1, choice=0)
STOP = 7
STEP_US_MAX = 60_000_000
STREAM_MS = 4


class Counting:
    """Draws the position of the row's token plus one; takes ``step_ms`` of a clock of its own,
    and a millisecond of everybody's."""

    def __init__(self, step_ms: int = 0, *, crash_at: int | None = None) -> None:
        self.step_ms = step_ms
        self.clock = ManualClock()
        self.crash_at = crash_at
        self.starts: list[int] = []
        self.call_steps: list[int] = []

    def use_opened(self, opened: SessionOpened) -> None:
        raise AssertionError("no pool is wanted")

    def let_go_discarded(self) -> bool:
        raise AssertionError("no pool is there")

    def run(self, plan: StepPlan) -> StepResult:
        row = plan.rows[0]
        if row.start == self.crash_at:
            raise ValueError("as the test wants")
        self.starts.append(row.start)
        self.clock.advance_ms(self.step_ms)
        time.sleep(0.001)
        drawn = (Drawn(KEY, row.start + 1),)
        return StepResult(plan.step, (RowResult(KEY, row.lease, revoked=False, drawn=drawn),))

    def run_on(self, plan: StepPlan, ahead: Ahead) -> StepResult:
        began_us, results = self.clock.now_us(), [self.run(plan)]
        following = plan_after(plan, results[-1])
        while following is not None and not ahead.end[0]:
            if self.clock.now_us() - began_us >= ahead.for_us:
                break
            results.append(self.run(following))
            following = plan_after(following, results[-1])
        self.call_steps.append(len(results))
        *before, last = (result.rows[0] for result in results)
        tokens = tuple(row.drawn[0].token for row in before)
        return StepResult(plan.step, (replace(last, before=tokens),), (1,) * len(results))

    def close(self) -> None: ...


def plan(repeat_count: int, *, stops: frozenset[int] = frozenset()) -> StepPlan:
    tokens = np.array([1], np.dtype("<u4"))
    row = StepRow(
        key=KEY, lease=1, lease_slot=0, granted_at=1, page_table=tokens, tokens=tokens, start=0,
        samples=(Sample(KEY, Sampling(max_tokens=100), tokens, 1),), stops=stops,
    )  # fmt: skip
    return StepPlan(1, (row,), repeat_count=repeat_count)


def step_count(report: StepsDone) -> int:
    return sum(len(result.took_us) for _, result in report.steps)


async def reports_of(
    executor: Counting, first: StepPlan, *, end_after: int = 0, stream_ms: int = STREAM_MS,
    step_us_max: int = STEP_US_MAX, turns: Turns | None = None,
) -> list[StepsDone]:  # fmt: skip
    """What the loop hears until the run is over; ``end_after`` reports it is ended."""
    heard: asyncio.Queue[StepsDone | BaseException] = asyncio.Queue()
    stepper = Stepper(
        executor, turns=turns or NoTurns(1), step_us_max=step_us_max, on_steps=heard.put_nowait,
        on_crash=heard.put_nowait, on_pool_missing=lambda _: None, clock=executor.clock,
        stream_ms=stream_ms,
    )  # fmt: skip
    reports: list[StepsDone] = []
    try:
        stepper.run(first)
        while True:
            report = await asyncio.wait_for(heard.get(), 10.0)
            if isinstance(report, BaseException):
                raise report
            reports.append(report)
            if len(reports) == end_after:
                stepper.end_run()
            if not report.goes_on:
                return reports
    finally:
        await stepper.close()


async def test_a_run_goes_on_by_itself_as_often_as_it_may() -> None:
    executor = Counting()
    reports = await reports_of(executor, plan(9))
    assert executor.starts == list(range(10))
    rows = [row for report in reports for _, result in report.steps for row in result.rows]
    assert [token for row in rows for token in (*row.before, row.drawn[0].token)] == [*range(1, 11)]
    assert [report.goes_on for report in reports][-1] is False


async def test_fast_steps_are_reported_together_and_slow_ones_at_once() -> None:
    fast = await reports_of(Counting(STREAM_MS // 4), plan(9))
    assert [step_count(report) for report in fast] == [1, 4, 4, 1]
    slow = await reports_of(Counting(2 * STREAM_MS), plan(4))
    assert [step_count(report) for report in slow] == [1, 1, 1, 1, 1]
    each = await reports_of(Counting(STREAM_MS // 4), plan(4), stream_ms=0)
    assert [step_count(report) for report in each] == [1, 1, 1, 1, 1]


async def test_what_is_reported_together_is_asked_for_in_one_call() -> None:
    executor = Counting(STREAM_MS // 4)
    reports = await reports_of(executor, plan(9))
    assert executor.call_steps == [step_count(report) for report in reports] == [1, 4, 4, 1]


async def test_a_call_takes_no_longer_than_a_part_of_what_a_step_may() -> None:
    executor = Counting(1)
    await reports_of(executor, plan(9), stream_ms=1_000, step_us_max=8_000)
    assert executor.call_steps == [1, 2, 2, 2, 2, 1]


class Wanted(NoTurns):
    """Somebody always waits."""

    def is_wanted(self) -> bool:
        return True


async def test_nothing_that_was_drawn_waits_for_the_turn_of_another() -> None:
    executor = Counting(1)
    reports = await reports_of(executor, plan(9), step_us_max=8_000, turns=Wanted(1))
    assert [step_count(report) for report in reports] == [1, 2, 2, 2, 2, 1]
    alone = await reports_of(Counting(1), plan(9), step_us_max=8_000, stream_ms=1_000)
    assert [step_count(report) for report in alone] == [1, 9]


class Counted(NoTurns):
    """Keeps how many steps each turn had."""

    def __init__(self) -> None:
        super().__init__(1)
        self.step_counts: list[int] = []

    def leave(self, step_count: int = 1) -> None:
        self.step_counts.append(step_count)


async def test_a_turn_is_left_after_as_many_steps_as_were_computed_in_it() -> None:
    turns = Counted()
    await reports_of(Counting(STREAM_MS // 4), plan(9), turns=turns)
    assert turns.step_counts == [1, 4, 4, 1]
    turns.step_counts.clear()
    with pytest.raises(ValueError, match="as the test wants"):
        await reports_of(Counting(crash_at=0), plan(9), turns=turns)
    assert turns.step_counts == [0]


async def test_the_first_step_of_a_run_is_reported_at_once_however_soon_it_comes() -> None:
    executor = Counting()
    heard: asyncio.Queue[StepsDone] = asyncio.Queue()
    stepper = Stepper(
        executor, turns=NoTurns(1), step_us_max=STEP_US_MAX, on_steps=heard.put_nowait,
        on_crash=lambda error: pytest.fail(repr(error)), on_pool_missing=lambda _: None,
        clock=executor.clock, stream_ms=STREAM_MS,
    )  # fmt: skip
    try:
        for _ in range(2):
            stepper.run(plan(2))
            reports = [await asyncio.wait_for(heard.get(), 10.0) for _ in range(2)]
            assert [step_count(report) for report in reports] == [1, 2]
    finally:
        await stepper.close()


async def test_a_stop_token_ends_a_run() -> None:
    executor = Counting()
    await reports_of(executor, plan(50, stops=frozenset({STOP})))
    assert executor.starts == list(range(STOP))


async def test_a_run_that_is_ended_begins_no_further_step() -> None:
    executor = Counting(5)
    reports = await reports_of(executor, plan(1_000), end_after=2)
    assert len(executor.starts) < 1_001
    assert sum(step_count(report) for report in reports) == len(executor.starts)


async def test_a_crash_in_the_middle_of_a_run_is_told() -> None:
    with pytest.raises(ValueError, match="as the test wants"):
        await reports_of(Counting(crash_at=3), plan(9))


class Fickle(Counting):
    """Has the pools of the incarnations it is told."""

    def __init__(self, *incarnations: int) -> None:
        super().__init__()
        self.incarnations = incarnations

    def use_opened(self, opened: SessionOpened) -> None:
        if opened.pool_incarnation not in self.incarnations:
            raise Gone(f"{opened.pool_path} is not there")

    def let_go_discarded(self) -> bool:
        return not self.incarnations


def opened(pool_incarnation: int) -> SessionOpened:
    return SessionOpened(
        host="h", epoch=1, pool_incarnation=pool_incarnation, pool=0, pool_path="/pool",
        page_count=8, session_ttl_ms=1_000, heartbeat_ms=100,
    )  # fmt: skip


async def test_without_its_pool_a_plan_is_not_computed_on_the_one_before() -> None:
    executor = Fickle(1, 3)
    heard: asyncio.Queue[StepsDone | SessionOpened | BaseException] = asyncio.Queue()
    used: list[int] = []
    stepper = Stepper(
        executor, turns=NoTurns(1), step_us_max=STEP_US_MAX, on_steps=heard.put_nowait,
        on_crash=heard.put_nowait, on_pool_missing=heard.put_nowait, clock=executor.clock,
        stream_ms=STREAM_MS, on_pool=lambda opened: used.append(opened.pool_incarnation),
    )  # fmt: skip
    try:
        revoked: list[bool] = []
        for incarnation in (1, 2, 3):
            stepper.use_pool(opened(incarnation))
            stepper.run(plan(0))
            if incarnation == 2:
                assert await asyncio.wait_for(heard.get(), 10.0) == opened(2)
            done = await asyncio.wait_for(heard.get(), 10.0)
            assert isinstance(done, StepsDone) and not done.goes_on
            revoked.append(done.steps[0][1].rows[0].revoked)
    finally:
        await stepper.close()
    assert revoked == [False, True, False] and len(executor.starts) == 2
    assert used == [1, 3], "steps can run over these"


class Beside(NoTurns):
    """With another, whose word is at an address."""

    def others_waiting(self) -> tuple[int, ...]:
        return (5,)


class Told(Counting):
    """Keeps how far ahead each call might go."""

    def __init__(self) -> None:
        super().__init__()
        self.aheads: list[Ahead] = []

    def run_on(self, plan: StepPlan, ahead: Ahead) -> StepResult:
        self.aheads.append(ahead)
        return super().run_on(plan, ahead)


async def test_a_call_is_told_of_all_that_ends_it_and_runs_after_one_that_was_ended_go_on() -> None:
    executor = Told()
    heard: asyncio.Queue[StepsDone] = asyncio.Queue()
    stepper = Stepper(
        executor, turns=Beside(1), step_us_max=STEP_US_MAX, on_steps=heard.put_nowait,
        on_crash=lambda error: None, on_pool_missing=lambda _: None, clock=executor.clock,
        stream_ms=STREAM_MS,
    )  # fmt: skip
    try:
        stepper.end_run()
        stepper.run(plan(4))
        while (await asyncio.wait_for(heard.get(), 10.0)).goes_on:
            continue
        assert len(executor.starts) == 5
        assert {ahead.waiting for ahead in executor.aheads} == {(5,)}
        stepper.end_run()
        assert all(ahead.end[0] for ahead in executor.aheads)
    finally:
        await stepper.close()


async def test_what_waits_is_forgotten_when_it_is_closed_and_nothing_is_taken_after() -> None:
    executor = Counting()
    stepper = Stepper(
        executor, turns=NoTurns(1), step_us_max=STEP_US_MAX, on_steps=lambda done: None,
        on_crash=lambda error: pytest.fail(repr(error)), on_pool_missing=lambda _: None,
        clock=executor.clock, stream_ms=STREAM_MS,
    )  # fmt: skip
    for _ in range(100):
        stepper.run(plan(0))
    await stepper.close()
    assert len(executor.starts) < 100
    with pytest.raises(RuntimeError, match="shutdown"):
        stepper.run(plan(0))
    await stepper.close()


async def test_a_pool_that_was_discarded_is_let_go_after_the_step_that_runs() -> None:
    executor = Fickle(1)
    heard: asyncio.Queue[StepsDone | SessionOpened | BaseException] = asyncio.Queue()
    stepper = Stepper(
        executor, turns=NoTurns(1), step_us_max=STEP_US_MAX, on_steps=heard.put_nowait,
        on_crash=heard.put_nowait, on_pool_missing=heard.put_nowait, clock=executor.clock,
        stream_ms=STREAM_MS,
    )  # fmt: skip

    async def hear_of_run() -> bool:
        """Whether its last step was revoked, once it has ended."""
        while True:
            done = await asyncio.wait_for(heard.get(), 10.0)
            assert isinstance(done, StepsDone), done
            if not done.goes_on:
                return done.steps[-1][1].rows[0].revoked

    try:
        stepper.use_pool(opened(1))
        stepper.run(plan(0))
        stepper.let_go_discarded()
        stepper.run(plan(0))
        assert not await hear_of_run() and not await hear_of_run(), "it is not discarded yet"
        stepper.run(plan(100_000))
        assert isinstance(await asyncio.wait_for(heard.get(), 10.0), StepsDone)
        executor.incarnations = ()
        stepper.let_go_discarded()
        assert not await hear_of_run(), "the run ended, with a step over the pool"
        assert await asyncio.wait_for(heard.get(), 10.0) == opened(1)
        stepper.run(plan(0))
        assert await hear_of_run()
        executor.incarnations = (2,)
        stepper.use_pool(opened(2))
        stepper.run(plan(0))
        assert not await hear_of_run()
    finally:
        await stepper.close()
    assert len(executor.starts) < 100_000
