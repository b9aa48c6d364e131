"""Services that must be alone, since two would both get what is meant for one.

    make:   asks on the subject before serving there
              nobody listens ----------------------------------------> serve, at once
              an answer, or none in time --> a living rival announces itself --> give way
                                     --> silence: what listens is frozen --> serve
    keep:   for the first seconds of serving: of rivals that began together, all but the one
            with the lowest incarnation give way

What an earlier service announced before it was killed is not heard: the subscription is younger.
After these seconds nobody gives way any more; gateways warn of two that serve.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from pagemesh.runtime.bus import Bus, BusState, Delivery
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.rpc import ask, send
from pagemesh.runtime.service import Stop
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import Absent, ConfigError, Disconnected, Fault
from pagemesh.wire.messages import Message
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


class Claim(ABC):
    """The claim of the service ``incarnation`` to be the only one that listens on ``subject``.
    Whoever does answers ``probe``, if only by a refusal."""

    def __init__(self, bus: Bus, incarnation: int, subject: str, probe: Message) -> None:
        self._bus = bus
        self._incarnation = incarnation
        self._subject, self._probe = subject, probe
        self._lost_to: Announce | None = None

    @abstractmethod
    def is_rival(self, other: Announce) -> bool:
        """Whether ``other``, of another incarnation, listens on the same subject."""

    @abstractmethod
    def refusal(self, other: Announce) -> str:
        """Says that ``other`` was first, and what to do."""

    async def make(self, stop: Stop) -> None:
        """Wait for a NATS server, or for ``stop``. Raises ``ConfigError`` if a living rival
        serves."""
        await self._connected(stop)
        async with self._listening(incarnation_max=_ANY) as rival:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FROZEN_S):
                    if await self._is_served():
                        self._lost_to = await rival
        self.check()

    async def keep(self, stop: Stop) -> None:
        """Request ``stop`` if this service is to give way; ``check`` then says to whom."""
        await self._connected(stop)
        async with self._listening(incarnation_max=self._incarnation - 1) as rival:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KEEP_S):
                    self._lost_to = await rival
                _log.error("service.gives_way", to=self._lost_to.name, host=self._lost_to.host)
                stop.request()

    @contextlib.asynccontextmanager
    async def kept(self, stop: Stop) -> AsyncIterator[None]:
        """``keep`` while inside, then ``check``."""
        keeping = asyncio.create_task(self.keep(stop), name="claim")
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
            if not keeping.cancelled() and (error := keeping.exception()) is not None:
                _log.error("service.claim_crashed", error=error)
        self.check()

    def check(self) -> None:
        """Raises ``ConfigError`` if this service is to give way."""
        if self._lost_to is not None:
            raise ConfigError(self.refusal(self._lost_to))

    async def _connected(self, stop: Stop) -> None:
        while not stop.requested and self._bus.state is not BusState.CONNECTED:
            with contextlib.suppress(Disconnected):
                await self._bus.wait_connected(timeout_ms=_CONNECT_MS)

    async def _is_served(self) -> bool:
        """Whether somebody listens on the subject."""
        try:
            send(self._bus, subjects.ASK_PRESENCE, AskPresence())
            await ask(self._bus, self._subject, self._probe, timeout_ms=_ANSWER_MS)
        except (Absent, Disconnected):
            return False
        except Fault:
            return True
        return True

    @contextlib.asynccontextmanager
    async def _listening(self, *, incarnation_max: int) -> AsyncIterator[asyncio.Future[Announce]]:
        """Yields the announcement of a rival that has no higher incarnation and is not about to
        end."""
        found: asyncio.Future[Announce] = asyncio.get_running_loop().create_future()

        def admit(delivery: Delivery) -> None:
            other = codec.decode(delivery.data)
            if (
                isinstance(other, Announce)
                and other.incarnation != self._incarnation
                and other.incarnation <= incarnation_max
                and other.state not in ("draining", "leaving")
                and not found.done()
                and self.is_rival(other)
            ):
                found.set_result(other)

        heard = await self._bus.subscribe(subjects.PRESENCE, admit)
        try:
            yield found
        finally:
            await self._bus.unsubscribe(heard)
