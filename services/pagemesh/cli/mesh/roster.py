"""Which services of the mesh are ready, as heard on the presence subject by a process that is not a
service itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import get_args

from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.clock import Clock, MonotonicClock
from pagemesh.runtime.directory import Changed, Directory, Joined
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import ConfigError, Fault
from pagemesh.wire.presence import Announce, AskPresence, Role

_LOOK_S, _LOOK_COUNT_MAX = 0.4, 4
"""Services that are there answer at once. A mesh that is just ending (because its `up` was killed)
gets a second and a half for it."""


class Roster:
    """``on_change`` gets the name of a service and the state it announced."""

    def __init__(self, clock: Clock, on_change: Callable[[str, str], None]) -> None:
        self.directory = Directory()
        self._clock = clock
        self._on_change = on_change

    async def listen(self, bus: Bus) -> None:
        """Hear announcements from now on. Raises ``Denied``."""
        await bus.subscribe(subjects.PRESENCE, self._admit)

    async def ask(self, bus: Bus) -> None:
        """Ask all services to announce themselves. The message may be lost; callers ask again."""
        with contextlib.suppress(Fault):
            bus.publish(subjects.ASK_PRESENCE, codec.encode(AskPresence()))

    def is_ready(self, name: str) -> bool:
        """Whether the service of that name, whatever its role, has announced that it is ready."""
        found = (self.directory.find(role, name) for role in get_args(Role))
        return any(announce is not None and announce.state == "ready" for announce in found)

    def _admit(self, delivery: Delivery) -> None:
        message = codec.decode(delivery.data)
        if not isinstance(message, Announce):
            return
        for change in self.directory.hear(message, self._clock.now_ms()):
            if isinstance(change, Joined | Changed):
                self._on_change(change.announce.name, change.announce.state)


async def check_host_is_free(bus: Bus, host: str) -> None:
    """Raises ``ConfigError`` if a pager of ``host`` is on the bus already, since both would answer
    messages meant for one. Raises ``Denied``."""
    for _ in range(_LOOK_COUNT_MAX):
        roster = Roster(MonotonicClock(), lambda _name, _state: None)
        await roster.listen(bus)
        await roster.ask(bus)
        await asyncio.sleep(_LOOK_S)
        if not any(pager.host == host for pager in roster.directory.of_role("pager")):
            return
    raise ConfigError(
        f"a mesh of host {host} uses the NATS server at {bus.config.shown_url} already; stop it, "
        "or give this one another host name (--host)"
    )
