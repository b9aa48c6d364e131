"""A life's own part: what a client did not get, it must not be told that it has."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
from msgspec import structs
from structlog.testing import capture_logs
from tests.unit.gateway.support import (
    DECODE,
    PREFILL,
    REQUEST,
    ROUTE,
    eventually,
    frame,
    spec,
)

from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.choice import TextPiece
from pagemesh.gateway.calls.request import RequestCore
from pagemesh.gateway.calls.spec import RequestLimits
from pagemesh.gateway.life import Life, Surroundings
from pagemesh.gateway.outbox import Outbox
from pagemesh.gateway.routing.router import Router
from pagemesh.runtime import rpc
from pagemesh.runtime.bus import Asked, Bus, BusState, Outgoing
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.trace import new_trace
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import (
    Absent,
    DeadlineExceeded,
    Disconnected,
    Fault,
    Gone,
    Internal,
    NotReady,
)
from pagemesh.wire.messages import Refused, SequenceKey
from pagemesh.wire.pager_messages import Admit
from pagemesh.wire.presence import PageNeeds
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import Abort, Accepted, Failure, Resend


class Connected:
    """A bus whose messages nobody answers. ``asked``: subjects, and what goes out behind."""

    state = BusState.CONNECTED

    def __init__(self) -> None:
        self.asked: list[tuple[str, Outgoing | None]] = []

    def ask(self, subject: str, _: bytes, *, then: Outgoing | None = None, **__: Any) -> None:
        self.asked.append((subject, then))

    async def wait_connected(self, **_: Any) -> None:
        return None


class OneWay(Router):
    """Every attempt goes by a route of its own. ``under_way``: sequences that do, by root."""

    under_way: Counter[bytes] = Counter()
    chosen_count = 0
    pages: ev.PagesFrom | None = None

    def choose(self, *_: Any, read_cache: bool = True) -> ev.Route | Fault:
        self.chosen_count += 1
        self.reads_cache = read_cache
        return replace(ROUTE, root=b"%032d" % self.chosen_count, pages=self.pages)

    def count(self, route: ev.Route, change: int, *, answered: bool = False) -> None:
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


def life(
    outbox: Outbox, router: OneWay | None = None, choice_count: int = 1, *,
    bus: Connected | None = None, told: list[Any] | None = None, read_cache: bool = True,
) -> Life:  # fmt: skip
    """``told``: requests that have ended, and workers that do not listen."""
    clock, told = MonotonicClock(), [] if told is None else told
    around = Surroundings(
        cast(Bus, bus or Connected()),
        clock,
        router or OneWay(b"secret"),
        lambda work, _: work.close(),
        told.append,
        told.append,
        lambda: True,
        lambda _: None,
    )
    request = spec(deadline_ms=clock.now_ms() + 60_000, choices=choice_count)
    request = replace(request, read_cache=read_cache)
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


def submit_of(made: Life) -> ev.SendSubmit:
    """Its core's first, which nobody performs."""
    now_ms = MonotonicClock().now_ms()
    made.core.handle(ev.Begin(), now_ms)
    [command] = made.core.handle(ev.Routed(ROUTE), now_ms)
    assert isinstance(command, ev.SendSubmit)
    return command


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
    await made._submitted(submit_of(made), cast(Asked, object()), new_trace(), 0)
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
        self.told: list[Any] = []
        self.life = life(Outbox(), told=self.told)
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


@pytest.mark.parametrize(
    ("outcome", "call_count"),
    [
        pytest.param(Gone("who?"), 1, id="once to who knows nothing of it"),
        pytest.param(DeadlineExceeded("no answer"), 3, id="until somebody has it, not for ever"),
    ],
)
async def test_an_abort_is_sent(
    monkeypatch: pytest.MonkeyPatch, outcome: Fault, call_count: int
) -> None:
    worker = Refusing(monkeypatch, outcome)
    abort = Abort(request=REQUEST, attempt=1, reason="client")
    await worker.life._abort(ev.SendAbort(PREFILL, abort))
    assert worker.call_count == call_count


@pytest.mark.parametrize("what", ["submit", "resend"])
@pytest.mark.parametrize(("fault", "told"), [(Absent("no"), [PREFILL]), (Gone("who?"), [])])
async def test_that_a_worker_does_not_listen_is_told_to_all_whoever_finds_out(
    monkeypatch: pytest.MonkeyPatch, what: str, fault: Fault, told: list[ev.Worker]
) -> None:
    asking = Refusing(monkeypatch, fault)
    if what == "resend":
        key = SequenceKey(request=REQUEST, attempt=1, choice=0)
        await asking.life._resend(ev.SendResend(PREFILL, Resend(key=key, position=0), 100))
    else:
        command = submit_of(asking.life)
        await asking.life._submitted(command, fault, new_trace(), 0)
    assert asking.told == told
    [event] = asking.fed
    assert event.answer.code == fault.code


async def test_what_a_client_is_not_told_of_an_error_in_the_mesh_is_in_the_log() -> None:
    made, untold = life(Outbox()), Failure(code="Internal", message="values that are not numbers")
    with capture_logs() as logs:
        made.feed(ev.Begin())
        while not made.core.ended:  # each further attempt fails likewise
            (choice,) = made.core.choices
            failed = structs.replace(frame(0, [], attempt=choice.attempt), error=untold)
            made.feed(ev.FrameArrived(DECODE, failed))
            choice.due_ms = 0
            made.feed(ev.Tick())
    (line,) = logs
    assert line["event"] == "gateway.request_failed" and line["request"] == REQUEST
    assert line["error"].message == "values that are not numbers"


async def test_a_bug_ends_the_request_it_is_met_in_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crash(*_: Any) -> None:
        raise ZeroDivisionError

    told: list[Any] = []
    outboxes = [Outbox(), Outbox()]
    struck, other = lives = [life(outbox, told=told) for outbox in outboxes]
    for one in lives:
        one.feed(ev.Begin())
    monkeypatch.setattr(struck.core, "handle", crash)
    for one in lives:
        one.feed(ev.FrameArrived(DECODE, frame(0, [1], finish="stop")))
    async with asyncio.timeout(5):
        [[(_, ended)], events] = [await outbox.take() for outbox in outboxes]
    assert isinstance(ended, ev.Ended) and isinstance(ended.outcome, ev.Failed)
    assert isinstance(ended.outcome.fault, Internal)
    assert events[-1][1] == ev.Ended(ev.Completed())
    assert told == [REQUEST] * 2, "neither is waited for any more"
    struck.feed(ev.Tick())
    assert other.core.ended


@pytest.mark.parametrize("read_cache", [False, True])
async def test_who_computes_the_whole_prompt_is_not_sent_where_it_is_cached(
    read_cache: bool,
) -> None:
    router = OneWay(b"secret")
    life(Outbox(), router, read_cache=read_cache).feed(ev.Begin())
    assert router.reads_cache is read_cache


async def test_each_route_that_was_found_is_given_and_no_other() -> None:
    given: list[ev.Route] = []
    router = LateWay(b"secret")
    made = life(Outbox(), router)
    made._around = replace(made._around, given=given.append)
    made.feed(ev.Begin())
    assert given == []
    await eventually(lambda: router.chosen_count == 1)
    made.feed(ev.WorkerLost(DECODE))
    made.feed(ev.WorkerLost(PREFILL))
    await eventually(lambda: router.chosen_count == 2)
    assert [route.root[-1:] for route in given] == [b"1", b"2"]
    made.feed(ev.ClientGone())


async def test_while_the_bus_is_away_nobody_is_chosen() -> None:
    router, bus = OneWay(b"secret"), Connected()
    bus.state = BusState.RECONNECTING
    made = life(Outbox(), router, bus=bus)
    made.feed(ev.Begin())
    assert (router.chosen_count, bus.asked) == (0, [])
    bus.state = BusState.CONNECTED
    await eventually(lambda: router.chosen_count == 1)
    made.feed(ev.ClientGone())


async def test_the_pager_that_is_asked_beside_a_submit_answers_to_its_worker() -> None:
    router, bus = OneWay(b"secret"), Connected()
    router.pages = ev.PagesFrom("a", 3, PageNeeds(growth_tokens=32, first_tokens=64))
    life(Outbox(), router, bus=bus).feed(ev.Begin())
    [(subject, then)] = bus.asked
    assert subject == subjects.worker(PREFILL.name) and then is not None
    assert (then.subject, then.reply) == (subjects.pager("a"), subjects.worker(PREFILL.name))
    admit = codec.decode(then.data)
    assert isinstance(admit, Admit) and admit.key.request == REQUEST


async def test_a_route_without_a_pager_has_none_asked() -> None:
    bus = Connected()
    life(Outbox(), bus=bus).feed(ev.Begin())
    assert bus.asked == [(subjects.worker(PREFILL.name), None)]
