"""Whether the mesh that ``pagemesh up`` runs is ready: at the start, and again after a service has
died.

Services announce it on the bus, and the gateway's HTTP health check confirms it. In between, `up`
is not subscribed, since all services announce their load there several times a second.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from pagemesh.cli.mesh.children import STARTED
from pagemesh.cli.mesh.plan_mesh import NatsServer
from pagemesh.cli.mesh.roster import Roster
from pagemesh.cli.mesh.screen import Screen
from pagemesh.cli.mesh.up_config import http_url
from pagemesh.runtime.bus import Bus, BusState
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.ids import new_service_name
from pagemesh.runtime.service_config import ServiceConfig
from pagemesh.wire.errors import PagemeshError

_POLL_S, _POLL_AGAIN_S = 0.05, 0.25
"""How often to check during the start, which people wait for, and while a mesh serves without a
service that died."""
_ASK_EVERY = 10
_RETURN_TIMEOUT_MS, _RETRY_S = 60_000, 1.0


@dataclass(frozen=True, slots=True)
class Members:
    """The services' ``names``, and the server ``nats`` if `up` started it."""

    names: Sequence[str]
    config: ServiceConfig
    nats: NatsServer | None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a member is started; cleared by each check of whether all are ready."""


async def become_ready(
    members: Members, screen: Screen, *, timeout_ms: int, poll_s: float = _POLL_S
) -> None:
    """Return when every service has announced that it is ready and the gateway serves. A NATS
    server that `up` started has as long to start as the services have. Raises ``TimeoutError``, and
    what ``Bus.connect`` raises."""
    config, nats = members.config, members.nats
    bus_config = nats.bus(config.bus, "operator") if nats else config.bus
    url, name = http_url(config) + "/health/ready", new_service_name("up")
    async with (
        asyncio.timeout(timeout_ms / 1_000),
        Bus.connect(bus_config, role="operator", name=name, patient=nats is not None) as bus,
        httpx.AsyncClient(timeout=2.0, trust_env=False) as client,
    ):
        await bus.wait_connected(timeout_ms=timeout_ms)
        if nats:
            screen.change(nats.spec.name, "ready")

        def show(name: str, state: str) -> None:
            if name in members.names:  # other meshes may share the server
                screen.change(name, state)

        roster = Roster(MonotonicClock(), show)
        await roster.listen(bus)

        def is_ready(name: str) -> bool:  # a death is known only to the screen
            return roster.is_ready(name) and screen.shows(name, "ready")

        def nats_is_ready() -> bool:
            if nats is None:
                return True
            if bus.state is BusState.CONNECTED and screen.shows(nats.spec.name, STARTED):
                screen.change(nats.spec.name, "ready")  # again: it died meanwhile
            return screen.shows(nats.spec.name, "ready")

        for poll in itertools.count():
            members.started.clear()
            ready = nats_is_ready() and all(map(is_ready, members.names))
            if ready and await _is_up(client, url):
                return
            if poll % _ASK_EVERY == 0:
                await roster.ask(bus)
            await asyncio.sleep(poll_s)


async def tell_of_returns(members: Members, screen: Screen) -> None:
    """Show restarted members as ready once they are. Runs until it is cancelled; failing to observe
    them is no failure of the mesh."""
    while True:
        await members.started.wait()
        try:
            await become_ready(members, screen, timeout_ms=_RETURN_TIMEOUT_MS, poll_s=_POLL_AGAIN_S)
        except (TimeoutError, PagemeshError):
            members.started.set()
            await asyncio.sleep(_RETRY_S)


async def _is_up(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
