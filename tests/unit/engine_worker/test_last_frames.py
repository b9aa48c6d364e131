"""Who sends the next turn of a chat at once finds what the last one left: its pages are given back
before its last frames go out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.engine_worker.bench import Bench, of_kind, submit

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.actor import Surroundings, WorkerBehaviour
from pagemesh.engine.worker.core import WorkerCore
from pagemesh.engine.worker.spans import SequenceSpans
from pagemesh.engine.worker.stepper import PoolingExecutor
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.wire import codec
from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import Release


class Recorder:
    """A bus that keeps what was sent, in order."""

    together = contextlib.nullcontext

    def __init__(self) -> None:
        self.sent: list[str] = []

    def publish(self, _subject: str, data: bytes, **_: Any) -> None:
        self.sent.append(type(codec.decode(data)).__name__)

    def ask(self, _subject: str, data: bytes, **_: Any) -> Awaitable[SimpleNamespace]:
        self.publish("", data)
        return self._answer()

    async def _answer(self) -> SimpleNamespace:
        await asyncio.sleep(0)
        return SimpleNamespace(data=codec.encode(Ok()))


def last_commands(*, amid_run: bool) -> list[ev.Command]:
    """What a core wants done once the last token of an answer is drawn."""
    bench = Bench(run_steps_max=8).start()
    bench.ask(submit(10, max_tokens=3, stop=9))
    bench.grant()
    while True:
        bench.log.clear()
        if amid_run:
            bench.run(9 if bench.tokens() else 50)
        else:
            bench.step()
        if any(frame.finish for frame in bench.frames):
            return list(bench.log)


@pytest.mark.parametrize("amid_run", [False, True])
async def test_the_release_goes_out_before_the_last_frames(amid_run: bool) -> None:
    commands, bus = last_commands(amid_run=amid_run), Recorder()
    assert [type(call.message) for call in of_kind(commands, ev.CallPager)] == [Release]
    around = SimpleNamespace(
        bus=bus, clock=MonotonicClock(), host="h", grammars=None,
        turns=SimpleNamespace(thread_count=1),
        step_us_max=1, stream_ms=0, admit=lambda _: None, on_patience=lambda: None,
    )  # fmt: skip
    core = SimpleNamespace(take=lambda _event, _now_ms: commands, go_on=lambda: (), ready=False)
    behaviour = WorkerBehaviour(
        cast(Surroundings, around), cast(WorkerCore, core), cast(PoolingExecutor, None),
        SequenceSpans("decode", "me", life_count_max=1),
    )  # fmt: skip
    await behaviour.handle(ev.StepsFinished(()))
    assert bus.sent == ["Release", "Frames"]
