"""A life's own part: what a client did not get, it must not be told that it has."""

from __future__ import annotations

from typing import Any, cast

from tests.unit.gateway.support import DECODE, PREFILL, ROUTE, eventually, frame, spec

from pagemesh.gateway import events as ev
from pagemesh.gateway.choice import TextPiece
from pagemesh.gateway.life import Life, Outbox, Surroundings
from pagemesh.gateway.request import RequestCore
from pagemesh.gateway.router import Router
from pagemesh.gateway.spec import RequestLimits
from pagemesh.runtime.bus import Bus, BusState
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.trace import new_trace
from pagemesh.wire.tokens import U32


class Connected:
    state = BusState.CONNECTED


class OneWay(Router):
    """``under_way``: choices that took the way and have not left it."""

    under_way = 0
    most = 0

    def choose(self, model: str, salt: bytes, want: ev.ChooseRoute, **_: Any) -> ev.Route:
        self.under_way += want.choice_count
        self.most = max(self.most, self.under_way)
        return ROUTE

    def left(self, route: ev.Route, choice_count: int) -> None:
        assert route == ROUTE
        self.under_way -= choice_count


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
        lambda: False,
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
    assert kinds[1:] == [ev.Ended(ev.Cancelled())]


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


async def test_choices_leave_the_way_they_took_when_they_take_another_and_at_the_end() -> None:
    router = OneWay(b"secret")
    made = life(Outbox(characters_max=100), router, choice_count=3)
    made.feed(ev.Begin())
    assert router.under_way == 3
    made.feed(ev.FrameArrived(DECODE, frame(0, [1], choice=1, finish="stop")))
    made.feed(ev.WorkerLost(DECODE))
    made.feed(ev.WorkerLost(PREFILL))
    await eventually(lambda: made.core.attempt_count == 2)
    assert (router.under_way, router.most) == (3, 3)
    made.feed(ev.ClientGone())
    assert router.under_way == 0
