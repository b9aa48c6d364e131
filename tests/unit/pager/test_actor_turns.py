"""The pager's actor gives itself one turn at a time for what was invalidated."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.pager.rig import LAYOUT, ROOT, Rig, Worker
from tests.unit.pager.steps import cache

from pagemesh.pager.actor import PagerActor
from pagemesh.pager.board import PagerBoard, PagerSettings
from pagemesh.pager.due import Due, LookDue, TickDue
from pagemesh.pager.events import Answer, Asked, Command, Recovered
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.retention import sweeps
from pagemesh.pager.state import PagerCore
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.pager.tiers.tier_events import PutAway
from pagemesh.runtime.bus import Bus, BusState, Delivery
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import codec, subjects
from pagemesh.wire.cache_messages import InvalidateCache
from pagemesh.wire.messages import Message
from pagemesh.wire.pager_messages import Declare, Declared, PoolSpec
from pagemesh.wire.pager_reports import InspectPager, PagerReport

PAGE_COUNT = 64
SPEC = PoolSpec(layout_digest=LAYOUT, page_size=4, page_bytes=1 << 12)


class Deaf:
    """A bus that nobody listens on."""

    config, state = BusConfig(), BusState.CONNECTED

    def publish(self, *_: Any, **__: Any) -> None:
        pass


class Inbox:
    """What waits for the actor; ``is_full``: nothing more is taken."""

    def __init__(self) -> None:
        self.waiting: deque[Due] = deque()
        self.is_full = False

    def wake(self, due: Due) -> bool:
        if not self.is_full:
            self.waiting.append(due)
        return not self.is_full


class Asking:
    """What a ``Worker`` needs of its rig, over the core of an actor."""

    page_size, place = SPEC.page_size, SPEC.place

    def __init__(self, core: PagerCore) -> None:
        self.core, self.epoch = core, core.books.facts.epoch

    def ask(self, message: Message) -> Message:
        commands = self.core.handle(Asked(None, message), MonotonicClock().now_ms())
        [answer] = [one for one in commands if isinstance(one, Answer)]
        return answer.message


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
async def actor(
    tmp_path: Path, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PagerActor]:
    """One that has many small turns to take for a root that was invalidated."""
    monkeypatch.setattr(sweeps, "_EDGES_MAX", 2)
    settings = PagerSettings(
        "host", "pager", 1, tmp_path, PAGE_COUNT * SPEC.page_bytes, b"secret", PagerLimits(), False,
        "lru",
    )  # fmt: skip
    made = PagerActor(
        settings, cast(Bus, Deaf()), MonotonicClock(), PagerBoard(settings), inbox.wake,
        PoolMemory(tmp_path),
    )  # fmt: skip
    assert made._holders.write() is None
    store = PoolStore.create(tmp_path, "host", SPEC, settings.pool_bytes)
    await made._start(store, adopted=False)
    asking = Asking(core_of(made))
    worker = Worker(cast(Rig, asking), "worker", 1)
    for number in range(20):
        cache(worker, number, [*range(4), *range(100 * number, 100 * number + 4)])
    asking.ask(InvalidateCache(what="root", name=ROOT.hex()))
    yield made
    await made.end()


def core_of(actor: PagerActor) -> PagerCore:
    assert actor._life is not None
    return actor._life.core


@pytest.mark.parametrize("due", [TickDue(), LookDue()])
async def test_what_comes_in_between_brings_no_more_turns_than_one_at_a_time(
    actor: PagerActor, inbox: Inbox, due: Due
) -> None:
    """Each turn asks for the next: those that others had added would go round with it, and
    whoever asks would wait for all of them."""
    for _ in range(5):
        await actor.handle(due)
        assert core_of(actor).is_sweeping and len(inbox.waiting) == 1
    while inbox.waiting:
        await actor.handle(inbox.waiting.popleft())
        assert len(inbox.waiting) <= 1
    assert core_of(actor).books.pool.free == PAGE_COUNT


async def test_a_turn_that_found_no_room_in_the_inbox_is_asked_for_again(
    actor: PagerActor, inbox: Inbox
) -> None:
    inbox.is_full = True
    await actor.handle(TickDue())
    inbox.is_full = False
    await actor.handle(LookDue())
    assert core_of(actor).is_sweeping and len(inbox.waiting) == 1


async def test_a_pager_that_ends_after_all_workers_gives_no_slot_away_for_what_it_cannot_have(
    actor: PagerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pages on a device: whoever had moved them is gone."""
    fed: list[object] = []

    async def feed(_life: object, event: object) -> None:
        fed.append(event)

    assert actor._life is not None
    monkeypatch.setattr(actor, "_feed", feed)
    for can_take, wanted in ((False, []), (True, [PutAway(anew=True)])):
        monkeypatch.setattr(
            actor._life, "disk", SimpleNamespace(can_take=can_take, patient=nullcontext)
        )
        await actor._put_away()
        assert fed == wanted
    monkeypatch.undo()


async def test_each_part_of_a_declaration_leaves_others_on_the_event_loop_their_turn(
    actor: PagerActor,
) -> None:
    answers: list[bytes] = []

    def respond(answer: bytes) -> None:
        answers.append(answer)

    message = Declare(
        worker="worker", incarnation=1, epoch=core_of(actor).books.facts.epoch, number=1, leases=[]
    )
    delivery = SimpleNamespace(
        data=codec.encode(message), subject=subjects.pager("host"), headers={}, respond=respond
    )
    had_turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(had_turn.set)
    await actor._request(cast(Delivery, delivery))
    assert had_turn.is_set() and codec.decode(answers[0]) == Declared(lost=[])


async def test_pages_that_nobody_has_are_reported_with_who_wrote_them(actor: PagerActor) -> None:
    core, answers = core_of(actor), list[bytes]()

    def respond(answer: bytes) -> None:
        answers.append(answer)

    await actor._perform(cast(Any, actor._life), lost_pages(core))
    delivery = SimpleNamespace(
        data=codec.encode(InspectPager()), subject=subjects.pager_report("host"), headers={},
        respond=respond,
    )  # fmt: skip
    await actor._request(cast(Delivery, delivery))
    [fault] = codec.decode_as(answers[0], PagerReport).faults
    assert (fault.what, fault.page_count, fault.owner) == (
        "pages are held, and nobody's", 2, "worker",
    )  # fmt: skip


def lost_pages(core: PagerCore) -> list[Command]:
    """Grant two pages that no lease has; what has to be written for that."""
    books = core.books
    books.out = []
    books.take_pages(2, 1, next(iter(books.forest.retired.values())))
    return books.out


@pytest.mark.sources
async def test_others_on_the_event_loop_have_their_turns_while_a_pool_is_rebuilt(
    actor: PagerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    had_turn, handle, loop = threading.Event(), PagerCore.handle, asyncio.get_running_loop()

    def rebuild(core: PagerCore, event: Recovered, now_ms: int) -> list[Command]:
        loop.call_soon_threadsafe(had_turn.set)
        assert had_turn.wait(10.0), "nobody had a turn"
        return handle(core, event, now_ms)

    await actor.end()
    monkeypatch.setattr(PagerCore, "handle", rebuild)
    await actor.begin()
    assert core_of(actor).books.pool.total == PAGE_COUNT
