"""The bus against a real nats-server: every habit of client and server that could surprise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from pagemesh.runtime.bus import Bus, BusState, Delivery
from pagemesh.runtime.bus.nats_client import header_block
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.rpc import answer, call, send
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import codec
from pagemesh.wire.errors import (
    Absent,
    Busy,
    DeadlineExceeded,
    Denied,
    Disconnected,
    Internal,
    Malformed,
    NoCapacity,
)
from pagemesh.wire.messages import Ok, Refused
from pagemesh.wire.presence import AskPresence


class Answers:
    """Answers deliveries from tasks of its own, as an actor would."""

    def __init__(self, respond: Callable[[Delivery], Awaitable[object]]) -> None:
        self._respond = respond
        self._tasks: set[asyncio.Task[object]] = set()

    def __call__(self, delivery: Delivery) -> None:
        task: asyncio.Task[object] = asyncio.ensure_future(self._run(delivery))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, delivery: Delivery) -> None:
        await self._respond(delivery)


async def echo(delivery: Delivery) -> None:
    delivery.respond(delivery.data, headers=delivery.headers)


def ignore(_delivery: Delivery) -> None:
    """Admit and never answer."""


async def test_a_request_gets_the_answer_and_its_headers(bus: Bus) -> None:
    await bus.subscribe("t.echo", Answers(echo))
    reply = await bus.request("t.echo", b"hello", timeout_ms=2_000, headers={"x-a": "1"})
    assert (reply.data, dict(reply.headers)) == (b"hello", {"x-a": "1"})


async def test_header_keys_are_lower_case_on_both_sides(bus: Bus) -> None:
    await bus.subscribe("t.case", Answers(echo))
    reply = await bus.request("t.case", b"", timeout_ms=2_000, headers={"TraceParent": "x"})
    assert dict(reply.headers) == {"traceparent": "x"}


async def test_nobody_listening_is_known_at_once(bus: Bus) -> None:
    started = time.monotonic()
    with pytest.raises(Absent):
        await bus.request("t.nobody", b"", timeout_ms=5_000)
    assert time.monotonic() - started < 1.0


async def test_no_answer_is_a_deadline_exceeded(bus: Bus) -> None:
    await bus.subscribe("t.silent", ignore)
    with pytest.raises(DeadlineExceeded):
        await bus.request("t.silent", b"", timeout_ms=50)
    with pytest.raises(DeadlineExceeded):
        await bus.request("t.silent", b"", timeout_ms=0)
    assert bus.statistics().requests_waiting == 0


async def test_what_subscribe_returned_receives_from_every_connection(
    shared_nats_server: NatsServer, bus: Bus
) -> None:
    config = BusConfig(url=shared_nats_server.url)
    async with Bus.connect(config, role="client", name="other") as other:
        for round_number in range(150):
            subject = f"t.barrier.{round_number}"
            made = await bus.subscribe(subject, Answers(echo))
            reply = await other.request(subject, b"x", timeout_ms=2_000)
            assert reply.data == b"x"
            await bus.unsubscribe(made)


async def test_after_a_barrier_all_that_was_sent_has_been_delivered(
    shared_nats_server: NatsServer, bus: Bus
) -> None:
    seen: list[bytes] = []
    config = BusConfig(url=shared_nats_server.url)
    async with Bus.connect(config, role="client", name="listener") as listener:
        await listener.subscribe("t.many", lambda delivery: seen.append(delivery.data))
        for number in range(2_000):
            bus.publish("t.many", b"%d" % number)
        await bus.barrier()
        await listener.barrier()
        await asyncio.sleep(0)
    assert seen == [b"%d" % number for number in range(2_000)]


async def test_a_cancelled_barrier_does_not_harm_the_connection(bus: Bus) -> None:
    for _ in range(20):
        task = asyncio.create_task(bus.barrier())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.05)
    await bus.barrier()
    assert bus.state is BusState.CONNECTED
    assert bus.counters.connects == 0


@pytest.mark.parametrize("headers", [{}, {"traceparent": "0" * 55}], ids=["bare", "headers"])
async def test_a_message_one_byte_too_large_is_refused_here_and_the_connection_lives(
    bus: Bus, headers: dict[str, str]
) -> None:
    await bus.subscribe("t.large", Answers(echo))
    room = bus.message_bytes_max - len(header_block(headers))
    with pytest.raises(Malformed, match=str(bus.message_bytes_max)):
        await bus.request("t.large", b"x" * (room + 1), timeout_ms=5_000, headers=headers)
    reply = await bus.request("t.large", b"x" * room, timeout_ms=10_000, headers=headers)
    assert len(reply.data) == room
    assert bus.counters.connects == 0


async def test_an_answer_that_is_too_large_becomes_a_refusal(bus: Bus) -> None:
    async def respond(delivery: Delivery) -> None:
        delivery.respond(b"x" * (bus.message_bytes_max + 1))

    await bus.subscribe("t.answer", Answers(respond))
    with pytest.raises(Malformed, match="exceeds the bus limit"):
        await call(bus, "t.answer", Ok(), Ok, timeout_ms=5_000)


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB evil 0\r\n", "x" * 2_000])
async def test_a_subject_that_could_not_travel_is_malformed(bus: Bus, subject: str) -> None:
    with pytest.raises(Malformed):
        bus.publish(subject, b"")
    with pytest.raises(Malformed):
        bus.publish("t.fine", b"", reply=subject or " ")
    await bus.barrier()
    assert bus.counters.connects == 0


async def test_a_header_cannot_smuggle_lines(bus: Bus) -> None:
    await bus.subscribe("t.smuggle", Answers(echo))
    reply = await bus.request("t.smuggle", b"", timeout_ms=2_000, headers={"x-a": "1\r\nx-evil: 2"})
    assert "x-evil" not in reply.headers
    with pytest.raises(Malformed):
        bus.publish("t.smuggle", b"", headers={"x-a\r\nx-evil": "1"})


async def test_a_fault_in_a_callback_is_the_answer(bus: Bus) -> None:
    def full(_delivery: Delivery) -> None:
        raise Busy("the inbox is full", retry_after_ms=7)

    await bus.subscribe("t.full", full)
    with pytest.raises(Busy, match="the inbox is full") as caught:
        await call(bus, "t.full", Ok(), Ok, timeout_ms=2_000)
    assert caught.value.retry_after_ms == 7


async def test_a_crash_in_a_callback_is_a_typed_internal_without_its_text(bus: Bus) -> None:
    def crash(_delivery: Delivery) -> None:
        raise RuntimeError("prompt: my secret")

    await bus.subscribe("t.crash", crash)
    reply = await bus.request("t.crash", b"", timeout_ms=2_000)
    refused = codec.decode(reply.data)
    assert isinstance(refused, Refused)
    assert isinstance(refused.error(), Internal)
    assert b"secret" not in reply.data
    assert bus.counters.crashed == 1


async def test_typed_calls_raise_what_the_peer_refused(bus: Bus) -> None:
    async def respond(delivery: Delivery) -> None:
        delivery.respond_error(NoCapacity("no pages", retry_after_ms=3))

    await bus.subscribe("t.refuse", Answers(respond))
    with pytest.raises(NoCapacity, match="no pages"):
        await call(bus, "t.refuse", AskPresence(), Ok, timeout_ms=2_000)


async def test_an_answer_of_another_type_is_malformed(bus: Bus) -> None:
    async def respond(delivery: Delivery) -> None:
        answer(delivery, AskPresence())

    await bus.subscribe("t.type", Answers(respond))
    with pytest.raises(Malformed, match="expected ok"):
        await call(bus, "t.type", Ok(), Ok, timeout_ms=2_000)


async def test_a_slow_callback_does_not_hold_up_other_subscriptions(bus: Bus) -> None:
    release = asyncio.Event()

    async def wait(delivery: Delivery) -> None:
        await release.wait()
        delivery.respond(b"late")

    await bus.subscribe("t.slow", Answers(wait))
    await bus.subscribe("t.quick", Answers(echo))
    slow = asyncio.create_task(bus.request("t.slow", b"", timeout_ms=5_000))
    for _ in range(10):
        await bus.request("t.quick", b"", timeout_ms=2_000)
    assert not slow.done()
    release.set()
    assert (await slow).data == b"late"


async def test_too_many_waiting_requests_are_refused(shared_nats_server: NatsServer) -> None:
    config = BusConfig(url=shared_nats_server.url, request_count_max=3)
    async with Bus.connect(config, role="client", name="few") as bus:
        await bus.subscribe("t.wait", ignore)
        waiting = [
            asyncio.create_task(bus.request("t.wait", b"", timeout_ms=200)) for _ in range(3)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await bus.request("t.wait", b"", timeout_ms=200)
        ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(end, DeadlineExceeded) for end in ends)


async def test_a_stream_of_answers_comes_in_order(bus: Bus) -> None:
    async def count(delivery: Delivery) -> None:
        for number in range(100):
            delivery.respond(b"%d" % number)
        delivery.respond(b"", headers={"last": "1"})

    await bus.subscribe("t.stream", Answers(count))
    got = []
    async with bus.request_many("t.stream", b"") as inbox:
        while "last" not in (reply := await inbox.receive(timeout_ms=2_000)).headers:
            got.append(int(reply.data))
    assert got == list(range(100))


async def test_a_stream_without_a_listener_ends_at_once(bus: Bus) -> None:
    async with bus.request_many("t.no.stream", b"") as inbox:
        with pytest.raises(Absent):
            await inbox.receive(timeout_ms=5_000)


async def test_a_reader_that_falls_behind_is_told_and_keeps_what_it_had(bus: Bus) -> None:
    async def count(delivery: Delivery) -> None:
        for number in range(50):
            delivery.respond(b"%d" % number)

    await bus.subscribe("t.behind", Answers(count))
    async with bus.request_many("t.behind", b"", message_count_max=10) as inbox:
        await asyncio.sleep(0.3)
        kept = [int((await inbox.receive(timeout_ms=100)).data) for _ in range(10)]
        with pytest.raises(Busy):
            await inbox.receive(timeout_ms=100)
    assert kept == list(range(10))


async def test_a_queue_group_gets_each_message_once(
    shared_nats_server: NatsServer, bus: Bus
) -> None:
    seen: list[bytes] = []
    config = BusConfig(url=shared_nats_server.url)
    async with Bus.connect(config, role="client", name="second") as second:
        for member in (bus, second):
            await member.subscribe("t.q", lambda d: seen.append(d.data), queue="workers")
        for number in range(200):
            bus.publish("t.q", b"%d" % number)
        await bus.barrier()
        await second.barrier()
        await asyncio.sleep(0.05)
    assert sorted(map(int, seen)) == list(range(200))


async def test_unsubscribing_ends_delivery_and_may_be_repeated(bus: Bus) -> None:
    made = await bus.subscribe("t.gone", ignore)
    await bus.unsubscribe(made)
    await bus.unsubscribe(made)
    with pytest.raises(Absent):
        await bus.request("t.gone", b"", timeout_ms=2_000)


async def test_a_member_that_leaves_a_queue_loses_no_request(
    shared_nats_server: NatsServer, bus: Bus
) -> None:
    config = BusConfig(url=shared_nats_server.url)
    async with (
        Bus.connect(config, role="client", name="leaves") as leaves,
        Bus.connect(config, role="client", name="asks") as asks,
    ):
        await bus.subscribe("t.leave", Answers(echo), queue="workers")
        for _ in range(10):
            made = await leaves.subscribe("t.leave", Answers(echo), queue="workers")
            waiting = [
                asyncio.create_task(asks.request("t.leave", b"x", timeout_ms=3_000))
                for _ in range(100)
            ]
            await asyncio.sleep(0.001)
            await leaves.unsubscribe(made)
            assert [reply.data for reply in await asyncio.gather(*waiting)] == [b"x"] * 100


async def test_a_closed_bus_fails_what_waits_and_what_comes(
    shared_nats_server: NatsServer,
) -> None:
    config = BusConfig(url=shared_nats_server.url)
    async with Bus.connect(config, role="client", name="short") as bus:
        await bus.subscribe("t.short", ignore)
        waiting = asyncio.create_task(bus.request("t.short", b"", timeout_ms=5_000))
        await bus.barrier()
    with pytest.raises(Disconnected):
        await waiting
    assert bus.state is BusState.CLOSED
    with pytest.raises(Disconnected):
        send(bus, "t.short", Ok())


async def test_a_denied_subject_is_denied_and_not_a_timeout(
    tmp_path: Path,
) -> None:
    extra = (
        'authorization { users: [ { user: "u", password: "p", permissions: {\n'
        '  publish: ["Allowed.>"], subscribe: ["_INBOX_client.>", "Allowed.>"],\n'
        "  allow_responses: true } } ] }\n"
    )
    with NatsServer(tmp_path / "nats", extra=extra) as server:
        config = BusConfig(url=server.url.replace("nats://", "nats://u:p@"))
        async with Bus.connect(config, role="client", name="tenant") as bus:
            started = time.monotonic()
            with pytest.raises(Denied, match="publish"):
                await bus.request("Secret.Thing", b"", timeout_ms=5_000)
            with pytest.raises(Denied, match="listen"):
                await bus.subscribe("Secret.>", ignore)
            assert time.monotonic() - started < 2.0
            await bus.subscribe("Allowed.echo", Answers(echo))
            assert (await bus.request("Allowed.echo", b"x", timeout_ms=2_000)).data == b"x"
            assert bus.counters.denied == 2
