"""Presence over the bus: announce this service, listen to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache

from pagemesh.runtime.bus import Bus, BusState, Delivery
from pagemesh.runtime.clock import Clock
from pagemesh.runtime.directory import Change, Directory
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.rpc import send
from pagemesh.runtime.supervise import Ticks, to_next_s
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import Fault, Malformed
from pagemesh.wire.messages import Message
from pagemesh.wire.presence import (
    PRESENCE_LOST_MS,
    PRESENCE_PERIOD_MS,
    Announce,
    AskPresence,
)

_ANNOUNCED_MAX = 256
"""Decoded announcements that are cached by their bytes."""
_WAKE_MS_MIN = 25
"""At most one announcement in this time, however many services ask."""
_LOOK_MS = 500
"""How long before a service counts as silent it is first looked for."""
_READ_MS = 100
"""How long this process reads what came in while it stood still, before anybody counts as silent.
"""
_STRANGERS_PERIOD_MS = 60_000
_ONE_VERSION = (
    "the sender is ignored; most likely it is of another version of pagemesh: run one version "
    "everywhere, or give each a NATS server of its own"
)
_log = get_logger(__name__)


class Presence:
    """Announces what ``describe`` returns at start, when asked, once a period and at the end;
    tells ``on_change`` (which only admits) which services joined, changed and were lost. A
    service without ``on_change`` only announces itself and does not listen to the others.

    While the bus is down no service counts as silent: it is this one that hears nothing. Nor does
    one whose announcements it has yet to read, because it stood still for a while.
    """

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        describe: Callable[[], Announce],
        on_change: Callable[[Change], None] | None = None,
        *,
        period_ms: int = PRESENCE_PERIOD_MS,
        lost_after_ms: int = PRESENCE_LOST_MS,
    ) -> None:
        self.directory = Directory(lost_after_ms=lost_after_ms)
        self._bus = bus
        self._clock = clock
        self._describe = describe
        self._on_change = on_change
        self._period_ms = period_ms
        self._lost_after_ms = lost_after_ms
        self._wanted = asyncio.Event()
        self._looked_ms = clock.now_ms()
        self._strangers_due_ms = 0
        bus.on_state(self._on_bus_state)

    def announce_soon(self) -> None:
        """Announce before the period is over: something changed that others should know."""
        self._wanted.set()

    async def run(self) -> None:
        """Run until cancelled, then say good-bye. Make it a named child of the service's task
        group."""
        expiry = Ticks(self._silent_in_ms, self._expire)
        heard = [await self._bus.subscribe(subjects.ASK_PRESENCE, self._asked)]
        if self._on_change is not None:
            heard.append(await self._bus.subscribe(subjects.PRESENCE, self._admit))
        try:
            if self._on_change is not None:
                self._say(subjects.ASK_PRESENCE, AskPresence())
                expiry.start()
            await self._announce()
        finally:
            expiry.stop()
            for subscription in heard:
                await self._bus.unsubscribe(subscription)
            leaving = self._describe()
            self._say(subjects.PRESENCE, _with_state_leaving(leaving))

    async def _announce(self) -> None:
        while True:
            self._wanted.clear()
            self._say(subjects.PRESENCE, self._describe())
            said_ms = self._clock.now_ms()
            try:
                async with asyncio.timeout(to_next_s(self._period_ms)):
                    await self._wanted.wait()
            except TimeoutError:
                continue
            early_ms = said_ms + _WAKE_MS_MIN - self._clock.now_ms()
            await asyncio.sleep(min(max(early_ms, 0), _WAKE_MS_MIN) / 1_000)

    def _say(self, subject: str, message: Message) -> None:
        try:
            send(self._bus, subject, message)
        except Fault:
            return  # the bus is down; when it is back, every service announces itself again

    def _admit(self, delivery: Delivery) -> None:
        try:
            message = _announced(delivery.data)
        except Malformed as fault:
            self._warn_of_stranger(delivery.data, fault)
            raise
        if not isinstance(message, Announce):
            raise Malformed("the presence subject accepts only Announce messages")
        self._tell(self.directory.hear(message, self._clock.now_ms()))

    def _warn_of_stranger(self, data: bytes, fault: Malformed) -> None:
        """Otherwise that service would be ignored without a word."""
        now_ms = self._clock.now_ms()
        if now_ms >= self._strangers_due_ms:
            self._strangers_due_ms = now_ms + _STRANGERS_PERIOD_MS
            who = codec.outline(data, "role", "name", "host")
            _log.warning("presence.not_understood", sender=who, error=fault, next=_ONE_VERSION)

    def _asked(self, delivery: Delivery) -> None:
        if not isinstance(codec.decode(delivery.data), AskPresence):
            raise Malformed("this subject accepts only AskPresence messages")
        self._wanted.set()

    def _silent_in_ms(self) -> int:
        """Milliseconds until the next look for services that may have to be counted as lost. One
        that is first heard after this call cannot be lost sooner."""
        silent_ms, now_ms = self.directory.silent_ms, self._clock.now_ms()
        left_ms = self._lost_after_ms if silent_ms is None else silent_ms - now_ms
        if left_ms > _LOOK_MS:
            return left_ms - _LOOK_MS
        return left_ms if left_ms > 0 else _READ_MS

    def _expire(self) -> None:
        now_ms = self._clock.now_ms()
        # Before somebody counts as silent there is a look at most ``_LOOK_MS`` earlier, if on time.
        may_have_stood_still = now_ms - self._looked_ms > 2 * _LOOK_MS
        self._looked_ms = now_ms
        if self._bus.state is not BusState.CONNECTED:
            self.directory.forgive(now_ms)
        if not may_have_stood_still:
            self._tell(self.directory.expire(now_ms))

    def _tell(self, changes: list[Change]) -> None:
        if self._on_change is not None:
            for change in changes:
                self._on_change(change)

    def _on_bus_state(self, state: BusState) -> None:
        if state is BusState.CONNECTED:
            self.directory.forgive(self._clock.now_ms())
            self._wanted.set()


@lru_cache(maxsize=_ANNOUNCED_MAX)
def _announced(data: bytes) -> Message:
    """Raises ``Malformed``. Cached, since an idle service announces the same twice a second."""
    return codec.decode(data)


def _with_state_leaving(announce: Announce) -> Announce:
    fields = {name: getattr(announce, name) for name in announce.__struct_fields__}
    return Announce(**(fields | {"state": "leaving"}))
