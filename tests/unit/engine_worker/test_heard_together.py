"""What came together is heard before the next step is planned, and a step that ended is followed at
once."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import cast

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.actor import Input, Surroundings, WorkerBehaviour
from pagemesh.engine.worker.core import WorkerCore
from pagemesh.engine.worker.spans import SequenceSpans
from pagemesh.engine.worker.stepper import PoolingExecutor, StepsDone
from pagemesh.runtime.actor import Actor
from pagemesh.runtime.clock import MonotonicClock

LOST = ev.GatewayLost("gw", 1)


class Core:
    """Writes down what it is told to do."""

    ready = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def take(self, event: ev.Event, _now_ms: float) -> list[ev.Command]:
        self.told.append(type(event).__name__)
        return []

    def go_on(self) -> list[ev.Command]:
        self.told.append("go on")
        return []


async def told(*inputs: Input) -> list[str]:
    """What a core is told when all of ``inputs`` are there at once."""
    core = Core()
    around = SimpleNamespace(
        clock=MonotonicClock(), host="h", grammars=None,
        turns=SimpleNamespace(thread_count=1, close=lambda: None),
        step_us_max=1, stream_ms=0, admit=lambda _: None,
        bus=SimpleNamespace(together=contextlib.nullcontext),
        on_patience=lambda: core.told.append("patience"),
    )  # fmt: skip
    executor = SimpleNamespace(close=lambda: None)
    actor = Actor(
        "worker",
        lambda: WorkerBehaviour(
            cast(Surroundings, around), cast(WorkerCore, core), cast(PoolingExecutor, executor),
            SequenceSpans("decode", "me", life_count_max=1),
        ),
        inbox_count_max=10,
    )  # fmt: skip
    for one in inputs:
        actor.admit(one)
    actor.stop()
    await actor.run()
    return core.told


async def test_who_is_let_in_together_is_planned_together() -> None:
    assert await told(LOST, LOST, LOST) == [
        "GatewayLost", "GatewayLost", "GatewayLost", "go on", "patience",
    ]  # fmt: skip


async def test_after_a_step_nobody_is_listened_to_first() -> None:
    done = StepsDone((), goes_on=False)
    assert await told(done, LOST) == [
        "StepsFinished", "go on", "patience", "GatewayLost", "go on", "patience",
    ]  # fmt: skip
