"""Requests wait for their grammar outside of the worker's core."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.unit.engine_worker.bench import submit

from pagemesh.engine.grammars import Grammars
from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.actor import Input, Surroundings, WorkerBehaviour
from pagemesh.engine.worker.core import WorkerCore
from pagemesh.engine.worker.grammar_gate import Compiled, GrammarGate
from pagemesh.engine.worker.spans import SequenceSpans
from pagemesh.engine.worker.stepper import PoolingExecutor
from pagemesh.runtime.bus import Delivery
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import Fault, GrammarRefused
from pagemesh.wire.pager_messages import AskedAs
from pagemesh.wire.work_messages import Sampling, Submit


class SlowGrammars:
    def __init__(self, error: Fault | None = None) -> None:
        self.known, self.vocab_tokens = {"old"}, 1_000
        self.go, self.asked = threading.Event(), list[str]()
        self._error = error

    def has(self, text: str) -> bool:
        return text in self.known

    def begun(self, text: str) -> None:
        self.asked.append(text)
        assert self.go.wait(20)
        if self._error is not None:
            raise self._error
        self.known.add(text)


class Asked:
    def __init__(self) -> None:
        self.errors: list[Fault] = []

    def respond_error(self, error: Fault) -> None:
        self.errors.append(error)


def gate_over(grammars: SlowGrammars) -> tuple[GrammarGate, list[Delivery], list[Any]]:
    admitted: list[Delivery] = []
    tasks: list[Any] = []

    def admit(event: Compiled) -> None:
        assert event.came_us == 7, "traces count the wait"
        admitted.append(event.delivery)

    track: Callable[[Any], None] = tasks.append
    return GrammarGate(cast(Grammars, grammars), admit, track), admitted, tasks


def delivery() -> Delivery:
    return cast(Delivery, Asked())


async def test_only_a_new_grammar_is_waited_for() -> None:
    grammars = SlowGrammars()
    gate, admitted, tasks = gate_over(grammars)
    assert not gate.holds(delivery(), "", 7)
    assert not gate.holds(delivery(), "old", 7)
    assert not tasks
    one = delivery()
    assert gate.holds(one, "new", 7)
    await asyncio.sleep(0.05)
    assert not admitted, "others are served meanwhile"
    grammars.go.set()
    await asyncio.gather(*tasks)
    assert admitted == [one]
    assert not gate.holds(delivery(), "new", 7)


async def test_a_grammar_that_cannot_be_compiled_is_refused_at_once() -> None:
    grammars = SlowGrammars(GrammarRefused("it makes no sense"))
    gate, admitted, tasks = gate_over(grammars)
    one = delivery()
    assert gate.holds(one, "wrong", 7)
    grammars.go.set()
    await asyncio.gather(*tasks)
    assert not admitted
    [error] = cast(Asked, one).errors
    assert isinstance(error, GrammarRefused)


async def test_a_bug_is_not_taken_for_a_wrong_grammar() -> None:
    grammars = SlowGrammars(cast(Fault, ZeroDivisionError()))
    gate, _, tasks = gate_over(grammars)
    assert gate.holds(delivery(), "new", 7)
    grammars.go.set()
    with pytest.raises(ZeroDivisionError):
        await asyncio.gather(*tasks)


class Core:
    """Keeps the submits that it is told."""

    ready = False

    def __init__(self) -> None:
        self.told: list[Submit] = []

    def take(self, event: ev.Received, _now_ms: float) -> list[ev.Command]:
        assert isinstance(event.message, Submit)
        self.told.append(event.message)
        return []

    def lives(self, _: object) -> bool:
        return True


async def test_pages_that_came_meanwhile_are_not_expected() -> None:
    core, grammars, inbox = Core(), SlowGrammars(), asyncio.Queue[Input]()
    bus = SimpleNamespace(
        together=contextlib.nullcontext, message_bytes_max=1 << 20,
        config=SimpleNamespace(output_bytes_max=1 << 20),
    )  # fmt: skip
    around = SimpleNamespace(
        clock=MonotonicClock(), host="h", name="me", grammars=grammars, bus=bus, stream_ms=0,
        turns=SimpleNamespace(thread_count=1, close=lambda: None), step_us_max=1,
        admit=inbox.put_nowait,
    )  # fmt: skip
    behaviour = WorkerBehaviour(
        cast(Surroundings, around), cast(WorkerCore, core),
        cast(PoolingExecutor, SimpleNamespace(close=lambda: None)),
        SequenceSpans("decode", "me", life_count_max=1),
    )  # fmt: skip
    asked = AskedAs(incarnation=5, epoch=1)

    async def tell(grammar: str) -> None:
        sampling = Sampling(max_tokens=5, grammar=grammar)
        made = msgspec.structs.replace(submit(10), sampling=sampling, asked_as=asked)
        data = codec.encode(made)
        await behaviour.handle(Delivery(cast(Any, bus), subjects.worker("me"), "", data, {}))

    await tell("old")
    await tell("new")
    assert [one.asked_as for one in core.told] == [asked]
    grammars.go.set()
    await behaviour.handle(await asyncio.wait_for(inbox.get(), 20))
    assert [one.asked_as for one in core.told] == [asked, None]
    assert core.told[1].sampling.grammar == "new"
    await behaviour.end()
    await behaviour.stepper.close()
