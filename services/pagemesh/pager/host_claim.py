"""One pager a host: two of one name would both answer what is meant for one.

    make:   asks on the host's subject before serving there
              nobody listens ----------------------------------------> serve, at once
              an answer, or none in time --> a living pager announces itself --> give way
                                     --> silence: what listens is frozen --> serve
    keep:   for the first seconds of serving: of pagers that began together, all but the one
            with the lowest incarnation give way

What an earlier pager announced before it was killed is not heard: the subscription is younger.
After these seconds nobody gives way any more; gateways warn of two pagers, and audits find them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from pagemesh.runtime.bus import Bus, BusState, Delivery
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.rpc import call, send
from pagemesh.runtime.service import Stop
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import Absent, ConfigError, Disconnected, Fault
from pagemesh.wire.pager_reports import PagesSnapshot, SnapshotWanted
from pagemesh.wire.presence import PRESENCE_PERIOD_MS, Announce, AskPresence

_ANSWER_MS = 500
"""How long to wait for an answer, which takes a millisecond."""
_FROZEN_S = 2 * PRESENCE_PERIOD_MS / 1_000
"""Who listens and has announced nothing for this long is frozen, or gone with its machine."""
_KEEP_S = 5.0
_CONNECT_MS = 500
_ANY = (1 << 64) - 1
"""The highest incarnation that there can be."""
_log = get_logger(__name__)
_NO_PAGES = SnapshotWanted(first=1 << 31)
"""What every pager answers, with an empty listing."""


class HostClaim:
    """The claim of the pager ``incarnation`` to the name ``host``."""

    def __init__(self, bus: Bus, host: str, incarnation: int) -> None:
        self._bus = bus
        self._host, self._incarnation = host, incarnation
        self._lost_to: Announce | None = None

    async def make(self, stop: Stop) -> None:
        """Wait for a NATS server, or for ``stop``. Raises ``ConfigError`` if a living pager serves
        the host."""
        while not stop.requested and self._bus.state is not BusState.CONNECTED:
            with contextlib.suppress(Disconnected):
                await self._bus.wait_connected(timeout_ms=_CONNECT_MS)
        async with self._listening(incarnation_max=_ANY) as rival:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FROZEN_S):
                    if await self._is_served():
                        self._lost_to = await rival
        self.check()

    async def keep(self, stop: Stop) -> None:
        """Request ``stop`` if this pager is to give way; ``check`` then says to whom."""
        async with self._listening(incarnation_max=self._incarnation - 1) as rival:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEEP_S):
                    self._lost_to = await rival
                _log.error("pager.gives_way", host=self._host, to=self._lost_to.name)
                stop.request()

    def check(self) -> None:
        """Raises ``ConfigError`` if this pager is to give way."""
        if self._lost_to is not None:
            raise ConfigError(
                f"pager {self._lost_to.name} serves host {self._host} at "
                f"{self._bus.config.shown_url} already; stop it, or give this one and its workers "
                "another host name (--host)"
            )

    async def _is_served(self) -> bool:
        """Whether somebody listens on the host's subject."""
        try:
            send(self._bus, subjects.ASK_PRESENCE, AskPresence())
            subject = subjects.pager(self._host)
            await call(self._bus, subject, _NO_PAGES, PagesSnapshot, timeout_ms=_ANSWER_MS)
        except (Absent, Disconnected):
            return False
        except Fault:
            return True
        return True

    @contextlib.asynccontextmanager
    async def _listening(self, *, incarnation_max: int) -> AsyncIterator[asyncio.Future[Announce]]:
        """Yields the announcement of another pager of the host that has no higher incarnation and
        is not about to end."""
        found: asyncio.Future[Announce] = asyncio.get_running_loop().create_future()

        def admit(delivery: Delivery) -> None:
            other = codec.decode(delivery.data)
            if (
                isinstance(other, Announce)
                and (other.role, other.host) == ("pager", self._host)
                and other.incarnation != self._incarnation
                and other.incarnation <= incarnation_max
                and other.state not in ("draining", "leaving")
                and not found.done()
            ):
                found.set_result(other)

        heard = await self._bus.subscribe(subjects.PRESENCE, admit)
        try:
            yield found
        finally:
            await self._bus.unsubscribe(heard)
