"""What becomes of an answer whose weights are served no more: it cannot go on with others."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs
from tests.unit.gateway.routes import FACTS, SALT, SECRET, worker
from tests.unit.gateway.support import DECODE, PREFILL, frame, spec
from tests.unit.gateway.test_request import LIMITS, Desk, of

from pagemesh.gateway.api.api_errors import from_fault
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.events import ChooseRoute, Worker
from pagemesh.gateway.routing.router import Router
from pagemesh.wire.errors import NotReady, Superseded
from pagemesh.wire.presence import Announce, State

LATER = structs.replace(FACTS, model_root=b"n" * 32)
WANTED = ChooseRoute(np.arange(32, dtype="<u4"), 16, 1, frozenset(), FACTS.model_root)


def later(name: str) -> Announce:
    return structs.replace(worker(name, "decode", incarnation=2), model=LATER)


def test_nobody_waits_for_weights_in_whose_place_others_are_served() -> None:
    router = Router(SECRET)
    router.announced(worker("d", "decode"))
    router.announced(later("d"))
    assert isinstance(router.choose("tiny", SALT, WANTED), Superseded)


@pytest.mark.parametrize("others", [(), ("e",)])
def test_a_worker_that_may_come_back_with_its_weights_is_waited_for(others: tuple[str]) -> None:
    router = Router(SECRET)
    router.announced(worker("d", "decode"))
    for name in others:
        router.announced(later(name))
    router.absent(Worker("d", 1))
    assert type(router.choose("tiny", SALT, WANTED)) is NotReady


@pytest.mark.parametrize("state", ["draining", "leaving"])
def test_a_worker_that_goes_is_nobody_to_wait_for(state: State) -> None:
    router = Router(SECRET)
    router.announced(worker("d", "decode"))
    router.announced(later("e"))
    router.announced(worker("d", "decode", state=state))
    assert isinstance(router.choose("tiny", SALT, WANTED), Superseded)


def test_an_answer_that_began_with_them_fails_within_two_seconds() -> None:
    desk = Desk(spec())
    desk.start()
    desk.arrive(frame(0, [5]))
    desk.feed(ev.WorkerLost(PREFILL), ev.WorkerLost(DECODE))
    since_ms = desk.now_ms
    while not desk.core.ended:
        assert desk.now_ms - since_ms < 2_000
        if of(desk.wait(250), ev.ChooseRoute):
            desk.feed(ev.Unroutable(Superseded("replaced"), expected=True))
    (ended,) = desk.ends()
    assert isinstance(ended.outcome, ev.Failed)
    error = from_fault(ended.outcome.fault)
    assert (error.status, error.code) == (503, "model_replaced")
    assert "replaced by another version" in error.message and "ask again" in error.message


def test_an_answer_of_which_nothing_was_said_yet_is_begun_with_the_others() -> None:
    desk = Desk(spec(choices=2))
    desk.start()
    desk.feed(ev.WorkerLost(PREFILL), ev.WorkerLost(DECODE))
    (choose,) = of(desk.wait(LIMITS.backoff_ms), ev.ChooseRoute)
    assert choose.model_root is None
