"""Why a connection to NATS was lost, in words for people."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from pagemesh.runtime.bus import link
from pagemesh.runtime.nats_server import NatsServer


def test_a_connection_found_closed_is_told_without_addresses_in_memory(
    shared_nats_server: NatsServer,
) -> None:
    """Services run on uvloop, which says it in words of its own."""

    async def told() -> str:
        host, port = shared_nats_server.url.removeprefix("nats://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.transport.abort()
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="0x") as caught:
            writer.transport.write(b"PING\r\n")
        return link._text(caught.value)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(told()) == "the connection was closed"
