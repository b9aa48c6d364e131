"""A life's own part: what a client did not get, it must not be told that it has."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from msgspec import structs
from tests.unit.gateway.support import (
    DECODE,
    PREFILL,
    REQUEST,
    ROUTE,
    eventually,
    frame,
    spec,
)

from pagemesh.gateway import life as life_module
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.choice import TextPiece
from pagemesh.gateway.calls.request import RequestCore
from pagemesh.gateway.calls.spec import RequestLimits
from pagemesh.gateway.life import Life, Outbox, Surroundings
from pagemesh.gateway.routing.router import Router
from pagemesh.runtime import rpc
from pagemesh.runtime.bus import Asked, Bus, BusState
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.trace import new_trace
from pagemesh.wire.errors import DeadlineExceeded, Disconnected, Fault, Gone, NotReady
from pagemesh.wire.messages import Refused, SequenceKey
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import Abort, Accepted, Resend


class Connected:
    """A bus whose messages nobody answers."""

    state = BusState.CONNECTED

    def ask(self, *_: Any, **__: Any) -> None:
        return None


class OneWay(Router):
    """Every attempt goes by a route of its own. ``under_way``: sequences that do, by root."""

    under_way: Counter[bytes] = Counter()
    chosen_count = 0

    def choose(self, *_: Any, **__: Any) -> ev.Route | Fault:
        self.chosen_count += 1
        return replace(ROUTE, root=b"%032d" % self.chosen_count)

    def count(self, route: ev.Route, change: int) -> None:
        assert change
        self.under_way = self.under_way + Counter({route.root[-1:]: change})

    @property
    def counts(self) -> list[int]:
        return [self.under_way[b"%d" % number] for number in range(1, self.chosen_count + 1)]


class Letters:
    """A letter for each token."""

    def push(self, tokens: U32) -> TextPiece:
        return TextPiece("x" * len(tokens), len(tokens))

    def close(self) -> str:
        return ""


def life(outbox: Outbox, router: OneWay | None = None, choice_count: int = 1) -> Life:
    clock = MonotonicClock()
    around = Surroundings(
        cast(Bus, Connected()),
        clock,
        router or OneWay(b"secret"),
        lambda work, _: work.close(),
        lambda _: None,
        lambda _: None,
        lambda: True,
        lambda _: None,
    )
    request = spec(deadline_ms=clock.now_ms() + 60_000, choices=choice_count)
    letters = [Letters() for _ in range(choice_count)]
    core = RequestCore(request, RequestLimits(), letters, clock.now_ms())
    return Life(around, core, outbox, prompt_index=0, model="m", salt=b"s", context=new_trace())


async def test_a_reader_that_missed_text_is_never_told_that_it_is_complete() -> None:
    outbox = Outbox(characters_max=10)
    made = life(outbox)
    made.feed(ev.Begin())
    made.feed(ev.FrameArrived(DECODE, frame(0, [1] * 8)))
    made.feed(ev.FrameArrived(DECODE, frame(8, [1] * 8, finish="stop")))
    kinds = [event for _, event in await outbox.take()]
    assert isinstance(kinds[0], ev.Deliver)
    assert kinds[1:] == [ev.Ended(ev.Cancelled("slow"))]


async def test_a_reader_that_waits_is_not_slow_however_much_comes_at_once() -> None:
    outbox = Outbox(characters_max=10, events_max=3)
    made = life(outbox, choice_count=3)
    made.feed(ev.Begin())
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    for choice in range(3):
        made.feed(ev.FrameArrived(DECODE, frame(0, [1] * 20, choice=choice, finish="stop")))
    events = [event for _, event in await reader]
    assert [type(event) for event in events] == [ev.Deliver, ev.ChoiceEnded] * 3 + [ev.Ended]
    assert events[-1] == ev.Ended(ev.Completed())


async def test_a_reader_that_has_gone_away_while_it_waited_is_slow() -> None:
    outbox = Outbox(characters_max=10)
    reader = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    assert not outbox.put(0, ev.Deliver(0, 0, np.zeros(1, "<u4"), "x" * 11, None, 0))


async def test_a_reader_that_keeps_up_is_told_the_end() -> None:
    outbox = Outbox(characters_max=10)
    made = life(outbox)
    made.feed(ev.Begin())
    for position in range(4):
        finish: Any = "stop" if position == 3 else None
        made.feed(ev.FrameArrived(DECODE, frame(8 * position, [1] * 8, finish=finish)))
        last = [event for _, event in await outbox.take()]
    assert [type(event) for event in last] == [ev.Deliver, ev.ChoiceEnded, ev.Ended]
    assert last[-1] == ev.Ended(ev.Completed())


async def test_choices_are_counted_where_they_are_and_as_long_as_they_are_there() -> None:
    router = OneWay(b"secret")
    made = life(Outbox(characters_max=100), router, choice_count=3)
    made.feed(ev.Begin())
    assert router.counts == [3]
    made.feed(ev.FrameArrived(DECODE, frame(0, [1], choice=1, finish="stop")))
    assert router.counts == [2]
    made.feed(ev.WorkerLost(DECODE))
    made.feed(ev.WorkerLost(PREFILL))
    await eventually(lambda: made.core.attempt_count == 2)
    assert router.counts == [0, 2]
    made.feed(ev.FrameArrived(DECODE, frame(0, [1], attempt=2, choice=2, finish="stop")))
    assert router.counts == [0, 1]
    made.feed(ev.ClientGone())
    assert router.counts == [0, 0]


class LateWay(OneWay):
    """Nobody is there the first three times."""

    tries = 0

    def choose(self, *args: Any, **kwargs: Any) -> ev.Route | Fault:
        self.tries += 1
        if self.tries <= 3:
            return NotReady("nobody", retry_after_ms=1_000)
        return super().choose(*args, **kwargs)


@pytest.mark.parametrize("tries", [3, 4])
async def test_a_search_for_a_worker_is_one_span_however_long_it_takes(
    tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[dict[str, Any]] = []
    monkeypatch.setattr(life_module, "record_span", lambda *_, **told: spans.append(told))
    router = LateWay(b"secret")
    made = life(Outbox(characters_max=100), router)
    made.feed(ev.Begin())
    async with asyncio.timeout(20):
        while router.tries < tries:
            assert spans == []
            await asyncio.sleep(0.01)
    if tries == 3:  # the client gives up while nobody is there
        made.feed(ev.ClientGone("left"))
    (route,) = spans
    assert route["error"] == ("NotReady" if tries == 3 else "")
    assert route["attributes"]["pagemesh.route.tries"] == tries
    assert route["end_us"] - route["start_us"] > 100_000
    assert ("pagemesh.worker" in route["attributes"]) == (tries == 4)
    made.feed(ev.ClientGone("left"))
    assert len(spans) == 1


async def heard(monkeypatch: pytest.MonkeyPatch, outcome: Accepted | Fault) -> str:
    """What the core hears of a submit that ends so: the code of a refusal, or nothing."""
    made = life(Outbox())
    fed: list[Any] = []

    async def answer_of(*_: Any) -> Accepted:
        if isinstance(outcome, Fault):
            raise outcome
        return outcome

    monkeypatch.setattr(rpc, "answer_of", answer_of)
    monkeypatch.setattr(made, "feed", fed.append)
    now_ms = MonotonicClock().now_ms()
    made.core.handle(ev.Begin(), now_ms)
    [command] = made.core.handle(ev.Routed(ROUTE), now_ms)
    assert isinstance(command, ev.SendSubmit)
    await made._submitted(command, cast(Asked, object()), new_trace(), 0)
    [event] = fed
    return event.answer.code if isinstance(event.answer, Refused) else ""


async def test_an_answer_of_another_life_of_the_worker_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Accepted(worker=PREFILL.name, incarnation=PREFILL.incarnation)
    assert await heard(monkeypatch, own) == ""
    other = structs.replace(own, incarnation=PREFILL.incarnation + 1)
    assert await heard(monkeypatch, other) == "Stale"


async def test_a_worker_that_does_not_answer_in_time_is_busy_and_no_end_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await heard(monkeypatch, DeadlineExceeded("no answer")) == "Busy"


class Refusing:
    """Every call fails so, and is counted; ``fed``: what the life's core hears of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: Fault) -> None:
        self.life = life(Outbox())
        self.fed: list[Any] = []
        self.call_count = 0

        async def call(*_: Any, **__: Any) -> None:
            self.call_count += 1
            raise outcome

        monkeypatch.setattr(rpc, "call", call)
        monkeypatch.setattr(self.life, "feed", self.fed.append)


async def test_that_we_are_cut_off_says_nothing_of_a_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = SequenceKey(request=REQUEST, attempt=1, choice=0)
    command = ev.SendResend(PREFILL, Resend(key=key, position=0), 100)
    cut_off = Refusing(monkeypatch, Disconnected("the bus is away"))
    await cut_off.life._resend(command)
    assert (cut_off.call_count, cut_off.fed) == (1, [])
    unknown = Refusing(monkeypatch, Gone("who?"))
    await unknown.life._resend(command)
    [event] = unknown.fed
    assert event.answer.code == "Gone"


async def test_who_knows_nothing_of_a_request_is_told_once_to_stop_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = Refusing(monkeypatch, Gone("who?"))
    abort = Abort(request=REQUEST, attempt=1, reason="client")
    await unknown.life._abort(ev.SendAbort(PREFILL, abort))
    assert unknown.call_count == 1
