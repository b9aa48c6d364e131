"""A bus that gathers: one write for what is sent in one turn of the event loop."""

from __future__ import annotations

import pytest

from pagemesh.runtime.bus import Bus
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.settings import BusConfig


async def test_a_bus_that_gathers_writes_the_first_message_of_a_turn_and_then_the_rest_at_once(
    shared_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, heard, written = BusConfig(url=shared_nats_server.url), list[bytes](), list[int]()
    async with Bus.connect(config, role="client", name="t", gathers=True) as bus:
        await bus.subscribe("t.gather", lambda delivery: heard.append(delivery.data))
        assert bus._link is not None
        transport = bus._link._client._transport
        write = transport.writelines

        def count(lines: list[bytes]) -> None:
            written.append(sum(line.startswith(b"PUB t.gather") for line in lines))
            write(lines)

        monkeypatch.setattr(transport, "writelines", count)
        for number in range(5):
            await bus.publish("t.gather", b"%d" % number)
        assert written == [1], "who sends one message does not wait for others"
        await bus.barrier()
    assert heard == [b"%d" % number for number in range(5)]
    assert [count for count in written if count] == [1, 4]
