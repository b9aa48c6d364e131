"""An actor behind a real bus: whatever happens to it, everybody is answered."""

from __future__ import annotations

import asyncio
import time

from pagemesh.runtime.actor import Actor, Behaviour
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.supervise import CrashLimit
from pagemesh.wire import codec
from pagemesh.wire.messages import Refused


class Slowly(Behaviour[Delivery]):
    """Answers each message after a moment; crashes on demand."""

    async def handle(self, event: Delivery) -> None:
        if event.data == b"crash":
            raise RuntimeError("planned")
        await asyncio.sleep(0.002)
        event.respond(b"done")


async def test_an_overloaded_actor_answers_everybody_with_work_or_busy(bus: Bus) -> None:
    actor: Actor[Delivery] = Actor("slow", Slowly, inbox_count_max=8)
    running = asyncio.create_task(actor.run())
    await bus.subscribe("t.actor", actor.admit)
    started = time.monotonic()
    asks = [asyncio.create_task(bus.request("t.actor", b"", timeout_ms=10_000)) for _ in range(500)]
    answers = [reply.data for reply in await asyncio.gather(*asks)]
    assert time.monotonic() - started < 5.0
    done = answers.count(b"done")
    refused = [codec.decode(data) for data in answers if data != b"done"]
    assert 8 <= done < 500
    assert {type(message) for message in refused} == {Refused}
    assert {message.code for message in refused if isinstance(message, Refused)} == {"Busy"}
    assert actor.statistics().refused_count == len(refused)
    actor.stop()
    await running


async def test_a_crashed_actor_answers_everybody_and_serves_again(bus: Bus) -> None:
    limit = CrashLimit(pause_ms=1)
    actor: Actor[Delivery] = Actor("brittle", Slowly, inbox_count_max=100, limit=limit)
    running = asyncio.create_task(actor.run())
    await bus.subscribe("t.brittle", actor.admit)
    bodies = [b"a", b"crash", b"b", b"c"]
    asks = [bus.request("t.brittle", body, timeout_ms=5_000) for body in bodies]
    answers = [reply.data for reply in await asyncio.gather(*asks)]
    codes = [
        message.code if isinstance(message := codec.decode(data), Refused) else "?"
        for data in answers
        if data != b"done"
    ]
    assert answers[0] == b"done"
    assert codes[0] == "Internal"
    assert (await bus.request("t.brittle", b"", timeout_ms=5_000)).data == b"done"
    actor.stop()
    await running
