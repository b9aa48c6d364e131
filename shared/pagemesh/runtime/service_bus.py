"""The bus of a service: connected whenever it can be, and a metric says whether it is."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from pagemesh.runtime.bus import Bus, BusState
from pagemesh.runtime.metrics import gauge
from pagemesh.runtime.settings import BusConfig

connected = gauge("bus_connected", "1 while the service is connected to NATS.")


@contextlib.asynccontextmanager
async def service_bus(
    config: BusConfig, *, role: str, name: str, gathers: bool = False
) -> AsyncIterator[Bus]:
    """A patient bus (``Bus.connect``) for as long as the context lasts."""
    async with Bus.connect(config, role=role, name=name, patient=True, gathers=gathers) as bus:
        show(bus.state)
        bus.on_state(show)
        yield bus


def show(state: BusState) -> None:
    connected.set(state is BusState.CONNECTED)
