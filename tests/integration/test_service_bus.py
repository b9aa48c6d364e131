"""The bus of a service says whether it is connected, and with which server."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs
from tests.integration.test_bus_faults import reaches

from pagemesh.runtime.bus import BusState
from pagemesh.runtime.metrics import REGISTRY
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.service_bus import service_bus
from pagemesh.runtime.settings import BusConfig


def measured() -> float | None:
    return REGISTRY.get_sample_value("pagemesh_bus_connected")


async def test_a_service_measures_whether_it_is_connected(nats_server: NatsServer) -> None:
    nats_server.kill()
    config = BusConfig(url=nats_server.url, reconnect_wait_ms=5, reconnect_wait_ms_max=20)
    async with service_bus(config, role="client", name="a") as bus:
        assert measured() == 0
        nats_server.start()
        await reaches(bus, BusState.CONNECTED)
        assert measured() == 1
        nats_server.kill()
        await reaches(bus, BusState.RECONNECTING)
        assert measured() == 0
        nats_server.start()
        await reaches(bus, BusState.CONNECTED)
    assert measured() == 0


async def test_of_several_servers_the_one_lost_and_the_one_found_are_named(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "a") as first, NatsServer(tmp_path / "b") as second:
        config = BusConfig(url=f"{first.url},nats://u:hush@127.0.0.1:{second.port}")
        first.kill()
        async with service_bus(config, role="client", name="a") as bus:
            await reaches(bus, BusState.CONNECTED)
            first.start()
            with capture_logs() as logs:
                second.kill()
                await reaches(bus, BusState.RECONNECTING)
                await reaches(bus, BusState.CONNECTED)
    told = {line["event"]: line["url"] for line in logs if line["event"] != "bus.unreachable"}
    assert told == {"bus.lost": second.url, "bus.connected": first.url}
