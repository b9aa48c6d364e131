"""Messages go straight from the socket to whom they are for: floods, long ones, broken ones."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.test_bus import Answers, echo

from pagemesh.runtime.bus import Bus, Delivery, Outgoing
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.rpc import answer, call
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire.errors import Busy, DeadlineExceeded, Fault, Malformed
from pagemesh.wire.messages import Ok


@pytest.mark.parametrize("size", [65_534, 65_535, 65_536, 65_537, 300_000])
async def test_long_payloads_and_what_follows_them_arrive_whole(bus: Bus, size: int) -> None:
    heard: list[tuple[bytes, dict[str, str]]] = []
    await bus.subscribe("t.long", lambda one: heard.append((one.data, dict(one.headers))))
    data = bytes(number % 251 for number in range(size))
    bus.publish("t.long", data, headers={"a": "1"}, then=Outgoing("t.long", b"short", ""))
    bus.publish("t.long", data)
    await bus.barrier()
    assert heard == [(data, {"a": "1"}), (b"short", {"a": "1"}), (data, {})]


async def test_no_task_stands_between_the_socket_and_a_callback(bus: Bus) -> None:
    tasks: list[object] = []
    await bus.subscribe("t.task", lambda _: tasks.append(asyncio.current_task()))
    bus.publish("t.task", b"one")
    await bus.barrier()
    assert tasks == [None]


async def test_what_is_no_message_of_ours_costs_others_nothing(
    shared_nats_server: NatsServer, bus: Bus
) -> None:
    await bus.subscribe("t.raw", Answers(echo))
    _, writer = await asyncio.open_connection("127.0.0.1", shared_nats_server.port)
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
    for raw in (
        b"PUB t.raw \xff\xfe 1\r\nx\r\n", b"HPUB t.raw 1 1\r\nx\r\n",
        b"HPUB t.raw 8 8\r\nNATS/1.0\r\n", b"HPUB t.raw 16 16\r\nNATS/1.0 \xff\xff\xff\r\n\r\n\r\n",
    ):  # fmt: skip
        writer.write(raw)
        await writer.drain()
        await asyncio.sleep(0.05)
        assert (await bus.request("t.raw", b"hello", timeout_ms=1_000)).data == b"hello"
    writer.close()
    assert bus.counters.connects == 0


async def test_a_refusal_that_crashes_costs_others_nothing(bus: Bus) -> None:
    def full(_delivery: Delivery) -> None:
        raise Busy("the inbox is full")

    def words(_fault: Fault) -> tuple[bytes, dict[str, str]]:
        raise RuntimeError("a bug")

    await bus.subscribe("t.bug", full, refusal=words)
    await bus.subscribe("t.fine", Answers(echo))
    with pytest.raises(DeadlineExceeded):
        await bus.request("t.bug", b"", timeout_ms=100)
    assert (await bus.request("t.fine", b"x", timeout_ms=1_000)).data == b"x"
    assert bus.counters.crashed == 1


async def test_a_question_that_was_not_sent_waits_for_nothing(bus: Bus) -> None:
    with pytest.raises(Malformed):
        bus.ask("no subject", b"", timeout_ms=1_000)
    assert bus.statistics().requests_waiting == 0
    await bus.subscribe("t.echo", Answers(echo))
    asked = bus.ask("t.echo", b"x", timeout_ms=1_000)
    await asyncio.sleep(0.05)
    assert (await asked).data == b"x", "the answer came before it was waited for"
    assert bus.statistics().requests_waiting == 0


async def test_of_a_flood_each_message_is_taken_or_refused(
    shared_nats_server: NatsServer, bus: Bus
) -> None:
    taken: list[Delivery] = []

    def admit(delivery: Delivery) -> None:
        if len(taken) == 10:
            raise Busy("the inbox is full")
        taken.append(delivery)

    async with Bus.connect(
        BusConfig(url=shared_nats_server.url), role="client", name="narrow"
    ) as narrow:
        await narrow.subscribe("t.flood", admit)
        asks = [call(bus, "t.flood", Ok(), Ok, timeout_ms=30_000) for _ in range(2_000)]
        waiting = [asyncio.create_task(ask) for ask in asks]
        await asyncio.wait(waiting, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        await bus.barrier()
        await narrow.barrier()
        for delivery in taken:
            answer(delivery, Ok())
        ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(end, Busy) for end in ends) == 1_990
    assert sum(isinstance(end, Ok) for end in ends) == 10


async def test_a_stream_whose_reader_falls_behind_ends_in_busy(bus: Bus) -> None:
    async def flood(delivery: Delivery) -> None:
        for _ in range(3_000):
            delivery.respond(b"x")

    await bus.subscribe("t.torrent", Answers(flood))
    async with bus.request_many("t.torrent", b"", message_count_max=100) as inbox:
        with pytest.raises(Busy):
            while True:
                await inbox.receive(timeout_ms=3_000)
                await asyncio.sleep(0)
