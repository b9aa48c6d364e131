"""Actors: bounded, answering always, restarted with a fresh core, drained on stop."""

from __future__ import annotations

import asyncio

import pytest

from pagemesh.runtime.actor import TURN_EVENTS_MAX, Actor, Behaviour
from pagemesh.runtime.bus.messages import Delivery, Headers
from pagemesh.runtime.supervise import CrashLimit, CrashLoop
from pagemesh.wire import codec
from pagemesh.wire.errors import Absent, Busy, Fault, Internal
from pagemesh.wire.messages import Refused

QUICK = CrashLimit(crash_count_max=3, window_ms=60_000, pause_ms=1)


class Notes(Behaviour[str]):
    """Writes down what it does; ``crash`` crashes it, ``wait`` waits for the gate."""

    def __init__(self, log: list[str], gate: asyncio.Event) -> None:
        self._log = log
        self._gate = gate

    async def begin(self) -> None:
        self._log.append("begin")

    async def handle(self, event: str) -> None:
        if event == "wait":
            await self._gate.wait()
        if event == "crash":
            raise RuntimeError("planned")
        self._log.append(event)

    def refuse(self, event: str, fault: Fault) -> None:
        self._log.append(f"{event}:{fault.code}")

    async def end(self) -> None:
        self._log.append("end")


def make(log: list[str], gate: asyncio.Event, *, inbox_count_max: int = 8) -> Actor[str]:
    return Actor("notes", lambda: Notes(log, gate), inbox_count_max=inbox_count_max, limit=QUICK)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_long_inbox_leaves_turns_to_others() -> None:
    log: list[str] = []
    count = 5 * TURN_EVENTS_MAX
    actor = make(log, asyncio.Event(), inbox_count_max=count)
    for _ in range(count):
        actor.admit("x")
    actor.stop()
    running = asyncio.create_task(actor.run())
    turns = 0
    while not running.done():
        await asyncio.sleep(0)
        turns += 1
    assert log.count("x") == count and turns >= 5


async def test_it_rests_once_for_all_that_was_queued_and_between_long_turns() -> None:
    class Resting(Notes):
        def rest(self) -> None:
            log.append("rest")

    log: list[str] = []
    count = TURN_EVENTS_MAX + 3
    actor = Actor("notes", lambda: Resting(log, asyncio.Event()), inbox_count_max=count)
    running = asyncio.create_task(actor.run())
    await settle()
    for _ in range(count):
        actor.admit("x")
    await settle()
    assert log == ["begin", "rest", *TURN_EVENTS_MAX * "x", "rest", *3 * "x", "rest"]
    actor.stop()
    await running


async def test_a_stopped_actor_rests_once_more_before_it_ends() -> None:
    class Resting(Notes):
        def rest(self) -> None:
            log.append("rest")

    log: list[str] = []
    actor = Actor("notes", lambda: Resting(log, asyncio.Event()), inbox_count_max=8)
    actor.admit("x")
    actor.stop()
    await actor.run()
    assert log == ["begin", "x", "rest", "end"]


async def test_what_is_queued_while_it_rests_is_handled() -> None:
    class Eager(Notes):
        def rest(self) -> None:
            if "again" not in log:
                actor.admit("again")

    log: list[str] = []
    actor = Actor("notes", lambda: Eager(log, asyncio.Event()), inbox_count_max=8)
    running = asyncio.create_task(actor.run())
    await settle()
    assert log == ["begin", "again"]
    actor.stop()
    await running


async def test_there_is_room_for_what_is_to_be_done_at_the_end_though_the_inbox_is_full() -> None:
    log: list[str] = []
    actor = make(log, asyncio.Event(), inbox_count_max=2)
    assert [actor.try_admit(event) for event in "abc"] == [True, True, False]
    actor.stop("put away")
    assert not actor.try_admit("d")
    await actor.run()
    assert log == ["begin", "a", "b", "put away", "end"]


async def test_events_are_handled_one_by_one_in_order() -> None:
    log: list[str] = []
    actor = make(log, asyncio.Event())
    for event in "abc":
        actor.admit(event)
    actor.stop()
    await actor.run()
    assert log == ["begin", "a", "b", "c", "end"]


async def test_a_full_inbox_refuses_at_once_and_drops_nothing() -> None:
    log: list[str] = []
    gate = asyncio.Event()
    actor = make(log, gate, inbox_count_max=2)
    running = asyncio.create_task(actor.run())
    actor.admit("wait")
    await settle()
    actor.admit("a")
    actor.admit("b")
    with pytest.raises(Busy) as caught:
        actor.admit("c")
    assert caught.value.retry_after_ms > 0
    assert not actor.try_admit("c")
    gate.set()
    actor.stop()
    await running
    assert log == ["begin", "wait", "a", "b", "end"]
    assert actor.statistics().queued_count_highest == 2
    assert actor.statistics().refused_count == 2


async def test_a_crash_refuses_what_is_queued_and_starts_a_fresh_behaviour() -> None:
    log: list[str] = []
    actor = make(log, asyncio.Event())
    running = asyncio.create_task(actor.run())
    for event in ("a", "crash", "b", "c"):
        actor.admit(event)
    while log.count("begin") < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    actor.admit("d")
    actor.stop()
    await running
    assert log == [
        "begin", "a", "crash:Internal", "b:Busy", "c:Busy", "end", "begin", "d", "end",
    ]  # fmt: skip
    assert actor.statistics().crash_count == 1


async def test_too_many_crashes_end_the_actor_and_refuse_the_rest() -> None:
    log: list[str] = []
    actor = make(log, asyncio.Event())
    running = asyncio.create_task(actor.run())
    for life in range(1, 4):
        actor.admit("crash")
        while log.count("end") < life:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    with pytest.raises(CrashLoop, match="crashed 3 times"):
        await running
    with pytest.raises(Absent):
        actor.admit("late")


async def test_stopping_drains_and_takes_nothing_new() -> None:
    log: list[str] = []
    gate = asyncio.Event()
    actor = make(log, gate)
    running = asyncio.create_task(actor.run())
    actor.admit("wait")
    await settle()
    actor.admit("a")
    actor.stop()
    with pytest.raises(Absent):
        actor.admit("b")
    gate.set()
    await running
    assert log == ["begin", "wait", "a", "end"]


async def test_a_cancelled_actor_refuses_what_it_did_not_handle() -> None:
    log: list[str] = []
    actor = make(log, asyncio.Event())
    running = asyncio.create_task(actor.run())
    actor.admit("wait")
    actor.admit("a")
    await settle()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert log == ["begin", "wait:Absent", "end", "a:Absent"]


class Sent:
    """Stands for the bus: keeps what was published."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def publish(self, subject: str, data: bytes, *, headers: Headers | None = None) -> None:
        assert subject == "inbox.1"
        self.messages.append(data)


async def test_a_delivery_in_a_crashed_actor_is_answered_without_the_error_text() -> None:
    class Broken(Behaviour[Delivery]):
        async def handle(self, event: Delivery) -> None:
            raise RuntimeError("prompt: secret")

    bus = Sent()
    actor = Actor("broken", Broken, inbox_count_max=4, limit=CrashLimit(crash_count_max=1))
    actor.admit(Delivery(bus, "s", "inbox.1", b"", {}))
    actor.admit(Delivery(bus, "s", "inbox.1", b"", {}))
    actor.admit(Delivery(bus, "s", "", b"", {}))
    with pytest.raises(CrashLoop):
        await actor.run()
    answers = [codec.decode(data) for data in bus.messages]
    assert [type(answer) for answer in answers] == [Refused, Refused]
    faults = [answer.error() for answer in answers if isinstance(answer, Refused)]
    assert isinstance(faults[0], Internal)
    assert isinstance(faults[1], Busy)
    assert not any(b"secret" in data for data in bus.messages)
