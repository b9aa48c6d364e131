"""The gateway process: tokenizer and templates, the bus, and both doors around one actor."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

from pagemesh.gateway.actor import GatewayActor
from pagemesh.gateway.api.sampling_defaults import sampling_defaults
from pagemesh.gateway.doors.address import take_address
from pagemesh.gateway.doors.bus_door import BusDoor
from pagemesh.gateway.doors.front import Front
from pagemesh.gateway.doors.http import HttpDoor
from pagemesh.gateway.doors.tenants import ANYBODY, Tenants
from pagemesh.gateway.namesakes import NameClaim
from pagemesh.gateway.routing.router import RouterLimits
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.runtime.bus import BusState
from pagemesh.runtime.garbage import spare_loaded
from pagemesh.runtime.ids import new_incarnation
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.service import Stop
from pagemesh.runtime.service_bus import service_bus
from pagemesh.runtime.service_config import ServiceConfig

_log = get_logger(__name__)
_NAMES_SHOWN_MAX = 8


async def run(config: ServiceConfig, stop: Stop) -> None:
    """Serve until ``stop``; then refuse new requests, finish the running ones, and return.

    Raises ``ConfigError`` for a wrong key, origin, model folder or port, without a NATS server, or
    if another gateway of this name serves.
    """
    secret = config.host.required_secret()
    gate = config.gateway
    tenants = Tenants(gate.api_keys.reveal(), secret, gate.tenant_limits)
    if unlucky := tenants.without_a_share:
        _log.warning(
            "gateway.no_share_left", tenants=unlucky[:_NAMES_SHOWN_MAX], count=len(unlucky),
            next="their cached pages are evicted first: lower the shares in "
            "PAGEMESH_TENANT_LIMITS to leave part of the pool, or give everybody else (*) a "
            "share",
        )  # fmt: skip
    if nobody := tenants.limited_nobody:
        _log.warning(
            "gateway.limits_of_nobody", tenants=nobody[:_NAMES_SHOWN_MAX], count=len(nobody),
            next="these tenants in PAGEMESH_TENANT_LIMITS have no key: use the names in "
            f"PAGEMESH_API_KEYS, or {ANYBODY!r} if there are no keys",
        )  # fmt: skip
    _ = gate.page_origins  # validated first: loading the model and joining the bus take a while
    with contextlib.closing(take_address(gate.http_host, gate.http_port)) as taken:
        await _serve(config, secret, tenants, taken, stop)


async def _serve(
    config: ServiceConfig, secret: bytes, tenants: Tenants, taken: socket.socket, stop: Stop
) -> None:
    gate = config.gateway
    folder = Path(config.worker.model)
    defaults = sampling_defaults(folder, gate.generation_config)
    tokens = await asyncio.to_thread(Tokens.load, folder)
    name = config.host.name
    incarnation = new_incarnation()
    async with service_bus(config.bus, role="gateway", name=name) as bus:
        claim = NameClaim(bus, name, incarnation)
        if bus.state is BusState.CONNECTED:  # or the doors would stay closed until it is
            await claim.make(stop)
        actor = GatewayActor(
            bus,
            name=name,
            incarnation=incarnation,
            host=config.host.host,
            model=config.worker.model_name,
            secret=secret,
            request_count_max=gate.request_count_max,
            limits=RouterLimits(always_prefill=gate.disaggregate == "always"),
        )
        async with claim.kept(stop), actor.running() as gateway:
            front = Front(
                gateway,
                tokens,
                tenants,
                model=config.worker.model_name,
                request_timeout_ms=gate.request_timeout_ms,
                defaults=defaults,
                trace_ratio=config.telemetry.sampled_ratio,
            )
            with contextlib.closing(front.next_turns):  # or exit would wait for its thread
                async with (
                    BusDoor(front, bus).open() as bus_door,
                    HttpDoor(front, gate).serve(taken) as url,
                ):
                    spare_loaded()
                    gateway.announce("ready")
                    keyless = tenants.open_to_all
                    _log.info(
                        "gateway.ready",
                        url=url,
                        model=front.model,
                        asks_for_keys=not keyless,
                        sampling_defaults=defaults.recommended,
                    )
                    await stop.wait()
                    gateway.announce("draining")
                    await bus_door.close()  # now: the HTTP door may take long to close
