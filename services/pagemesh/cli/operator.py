"""How operators' commands reach a running mesh: which NATS server to use, and who is on it.

Without ``--nats``, it is the server of the only `pagemesh up` on this machine, which has written
the operator's URL to its folder.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pagemesh.cli.gateway_url import of_named_mesh, pool_dir_flag
from pagemesh.cli.mesh.roster import Roster
from pagemesh.cli.mesh.run_folder import GATEWAY, running_urls
from pagemesh.cli.options import check_variables, config_flags, given_flags
from pagemesh.runtime.bus import Bus
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.config import load
from pagemesh.runtime.ids import new_service_name
from pagemesh.runtime.logs import quiet_libraries
from pagemesh.runtime.settings import BusConfig, HostConfig
from pagemesh.wire import subjects
from pagemesh.wire.errors import ConfigError, Fault, Malformed, NotReady, fault
from pagemesh.wire.messages import Message
from pagemesh.wire.presence import Announce

_TUNING = tuple(
    f"PAGEMESH_NATS_{name}"
    for name in (
        "CONNECT_TIMEOUT_MS", "START_WAIT_MS", "RECONNECT_WAIT_MS", "RECONNECT_WAIT_MS_MAX",
        "HEARTBEAT_MS", "HEARTBEAT_TIMEOUT_MS", "REQUEST_COUNT_MAX", "OUTPUT_BYTES_MAX",
    )
)  # fmt: skip
"""Connection settings that get no flag: a command that lasts a second does not need them."""
_nats_flags = config_flags(
    BusConfig, defaults={"PAGEMESH_NATS": "that of `pagemesh up` on this machine"}, without=_TUNING
)
ASK_TIMEOUT_MS = 10_000
_QUIET_S, _LISTEN_S_MAX = 0.4, 2.5
_GUESS_WAIT_MS = 1_000
"""How long to wait for a server that nobody named: either it is running, or it is not the one that
is meant."""
_NO_SERVER = "no NATS server at "
A = TypeVar("A", bound=Message)
F = TypeVar("F", bound=Callable[..., Any])


def bus_flags(command: F) -> F:
    """Add the flags that say where the mesh is."""
    return _nats_flags(pool_dir_flag(command))


@dataclass(frozen=True, slots=True)
class _Guess(BusConfig):
    """The default server, tried if none was named and no `pagemesh up` was found in
    ``looked_in``."""

    looked_in: Path = Path()


@dataclass(frozen=True, slots=True)
class Mesh:
    """A connection to the bus, and the services that have announced themselves on it."""

    bus: Bus
    pagers: tuple[Announce, ...]
    workers: tuple[Announce, ...]

    async def ask(self, verb: str, message: Message, kind: type[A]) -> dict[str, A | Fault]:
        """What each pager answers to ``message`` at the operators' door, by host."""
        hosts = [pager.host for pager in self.pagers]
        answers = await asyncio.gather(*(self._ask(verb, host, message, kind) for host in hosts))
        return dict(zip(hosts, answers, strict=True))

    async def _ask(self, verb: str, host: str, message: Message, kind: type[A]) -> A | Fault:
        body = msgspec.json.encode(message)
        try:
            reply = await self.bus.request(
                subjects.cache_door(verb, host), body, timeout_ms=ASK_TIMEOUT_MS
            )
        except Fault as error:
            return error
        try:
            answer: Any = msgspec.json.decode(reply.data)
            if "error" in answer:
                return fault(answer["error"]["code"], answer["error"]["message"])
            return msgspec.convert(answer, kind)
        except (msgspec.MsgspecError, TypeError, KeyError):
            return Malformed("this version of pagemesh does not understand its answer")


def fault_entry(host: str, error: Fault) -> dict[str, object]:
    """The JSON entry of a host that refused the request or did not answer."""
    return {"host": host, "error": {"code": error.code, "message": error.message}}


def bus_config(arguments: Mapping[str, object]) -> BusConfig:
    """The connection named by flags, the environment or a running `pagemesh up`. Raises
    ``ConfigError``."""
    check_variables()
    flags = given_flags(arguments)
    config = load(BusConfig, os.environ, flags)
    if "PAGEMESH_NATS" in flags or "PAGEMESH_NATS" in os.environ:
        return config
    base = load(HostConfig, os.environ, flags).pool_dir
    gateway = flags.get("PAGEMESH_URL", os.environ.get("PAGEMESH_URL", ""))
    files = of_named_mesh(running_urls(base, "operator"), base, GATEWAY, gateway)
    if len(set(files.values())) > 1:
        raise ConfigError(_choice(base, files))
    if files:
        return replace(config, url=next(iter(files.values())))
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    given["start_wait_ms"] = min(config.start_wait_ms, _GUESS_WAIT_MS)
    return _Guess(**given, looked_in=base)


def _choice(base: Path, files: Iterable[Path]) -> str:
    """The error for several running meshes. It names files instead of URLs, which hold passwords
    that must not end up on a command line."""
    gateways = {file.parent: url for file, url in running_urls(base, GATEWAY).items()}
    named = [f"{file} ({gateways.get(file.parent, 'not serving yet')})" for file in files]
    return (
        f"{len(named)} meshes run here; name one with PAGEMESH_NATS=$(cat FILE) before the "
        f"command, where FILE is {' or '.join(named)}"
    )


@asynccontextmanager
async def _bus(config: BusConfig) -> AsyncIterator[Bus]:
    """A connection as operator. Raises ``ConfigError``; its message says if no server was named."""
    quiet_libraries()
    async with AsyncExitStack() as stack:
        name = new_service_name("cli")
        try:
            connecting = Bus.connect(config, role="operator", name=name)
            bus = await stack.enter_async_context(connecting)
        except ConfigError as error:
            if not isinstance(config, _Guess) or not str(error).startswith(_NO_SERVER):
                raise
            raise ConfigError(
                f"no `pagemesh up` of yours runs on this machine, and "
                f"{str(error).partition(';')[0]}; {config.looked_in} was looked into: name another "
                "pool folder with --pool-dir, or name the NATS server of your mesh with --nats URL"
            ) from None
        yield bus


@asynccontextmanager
async def connected(config: BusConfig) -> AsyncIterator[Mesh]:
    """The mesh, once its services have announced themselves. Raises ``ConfigError``, or
    ``NotReady`` when there is no pager."""
    async with _bus(config) as bus:
        heard = asyncio.Event()
        roster = Roster(MonotonicClock(), lambda _name, _state: heard.set())
        await roster.listen(bus)
        await roster.ask(bus)
        try:
            async with asyncio.timeout(_LISTEN_S_MAX):
                while True:  # until there is a pager and announcements have ceased for a while
                    heard.clear()
                    has_pager = bool(roster.directory.of_role("pager"))
                    async with asyncio.timeout(_QUIET_S if has_pager else _LISTEN_S_MAX):
                        await heard.wait()
        except TimeoutError:
            pass
        there = roster.directory
        pagers = tuple(sorted(there.of_role("pager"), key=lambda pager: pager.host))
        if not pagers:
            raise NotReady(
                "no pager answered; start a mesh with `pagemesh up`, or name its NATS server with "
                "--nats"
            )
        workers = (*there.of_role("prefill"), *there.of_role("decode"))
        yield Mesh(bus, pagers, workers)
