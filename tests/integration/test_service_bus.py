"""The bus of a service says in a metric whether it is connected."""

from __future__ import annotations

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
