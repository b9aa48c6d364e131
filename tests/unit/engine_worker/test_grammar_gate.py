"""Requests wait for their grammar outside of the worker's core."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from pagemesh.engine.grammars import Grammars
from pagemesh.engine.worker.grammar_gate import Compiled, GrammarGate
from pagemesh.runtime.bus import Delivery
from pagemesh.wire.errors import Fault, GrammarRefused


class SlowGrammars:
    def __init__(self, error: Fault | None = None) -> None:
        self.known = {"old"}
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
