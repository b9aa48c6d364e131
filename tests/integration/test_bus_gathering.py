"""What goes out in one write: messages of a turn of the event loop, and what follows a request."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.test_bus import Answers, echo

from pagemesh.runtime.bus import Bus, Outgoing
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire.errors import Disconnected, Malformed


def count_writes(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The messages of each write from now on."""
    written: list[int] = []
    assert bus._link is not None
    transport = bus._link._client._transport
    write = transport.writelines

    def count(lines: list[bytes]) -> None:
        written.append(sum(line.startswith(b"PUB t.gather") for line in lines))
        write(lines)

    monkeypatch.setattr(transport, "writelines", count)
    return written


async def test_a_bus_that_gathers_writes_the_first_message_of_a_turn_and_then_the_rest_at_once(
    shared_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, heard = BusConfig(url=shared_nats_server.url), list[bytes]()
    async with Bus.connect(config, role="client", name="t", gathers=True) as bus:
        await bus.subscribe("t.gather", lambda delivery: heard.append(delivery.data))
        written = count_writes(bus, monkeypatch)
        for number in range(5):
            bus.publish("t.gather", b"%d" % number)
        assert written == [1], "who sends one message does not wait for others"
        await bus.barrier()
    assert heard == [b"%d" % number for number in range(5)]
    assert [count for count in written if count] == [1, 4]


async def test_within_a_turn_that_is_gathered_together_changes_nothing(
    shared_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = BusConfig(url=shared_nats_server.url)
    async with Bus.connect(config, role="client", name="t", gathers=True) as bus:
        written = count_writes(bus, monkeypatch)
        for number in range(3):
            with bus.together():
                bus.publish("t.gather", b"%d" % number)
        assert written == [1]
        await bus.barrier()
    assert [count for count in written if count] == [1, 2]


async def test_what_is_sent_together_goes_out_in_two_writes_and_what_comes_after_by_itself(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[bytes] = []
    await bus.subscribe("t.gather", lambda delivery: heard.append(delivery.data))
    written = count_writes(bus, monkeypatch)
    with pytest.raises(ZeroDivisionError), bus.together():
        for number in range(5):
            bus.publish("t.gather", b"%d" % number)
            assert written == [1], "the first does not wait for the others"
        _ = 1 / 0
    assert written == [1, 4], "what was sent is sent, whatever comes after it"
    for number in (5, 6):
        bus.publish("t.gather", b"%d" % number)
    assert written == [1, 4, 1, 1]
    await bus.barrier()
    assert heard == [b"%d" % number for number in range(7)]


async def test_a_bus_without_a_server_refuses_what_is_sent_together_too(
    shared_nats_server: NatsServer,
) -> None:
    async with Bus.connect(BusConfig(url=shared_nats_server.url), role="client", name="t") as bus:
        pass
    with bus.together(), pytest.raises(Disconnected):
        bus.publish("t.gather", b"")


async def test_what_goes_out_behind_a_request_is_answered_to_whom_it_says(bus: Bus) -> None:
    heard: list[tuple[str, bytes]] = []
    for subject in ("t.then", "t.other"):
        await bus.subscribe(subject, Answers(echo))
    await bus.subscribe("t.whom", lambda one: heard.append((one.subject, one.data)))
    then = Outgoing("t.other", b"second", "t.whom")
    reply = await bus.request("t.then", b"first", timeout_ms=2_000, then=then)
    await bus.barrier()
    await asyncio.sleep(0.05)
    assert (reply.data, heard) == (b"first", [("t.whom", b"second")])
    sent = bus.counters.sent
    with pytest.raises(Malformed):
        await bus.request("t.then", b"first", timeout_ms=99, then=Outgoing("no subject", b"", ""))
    assert bus.counters.sent == sent, "all or none"
