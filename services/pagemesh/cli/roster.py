"""Which services of the mesh say that they are ready, heard on the presence subject."""

from __future__ import annotations

from collections.abc import Callable

from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import Fault
from pagemesh.wire.presence import Announce, AskPresence

SERVICE_COUNT_MAX = 4_096


class Roster:
    """The last announcement of each service, by name. ``on_change`` gets name and state."""

    def __init__(self, on_change: Callable[[str, str], None]) -> None:
        self._on_change = on_change
        self._last: dict[str, Announce] = {}

    async def listen(self, bus: Bus) -> None:
        """Hear announcements from now on. Raises ``Denied``."""
        await bus.subscribe(subjects.PRESENCE, self._admit)

    async def ask(self, bus: Bus) -> None:
        """Have everyone announce itself; what is lost is asked for again by the caller."""
        try:
            await bus.publish(subjects.PRESENCE, codec.encode(AskPresence()))
        except Fault:
            return

    def is_ready(self, name: str) -> bool:
        return name in self._last and self._last[name].state == "ready"

    def model(self) -> str:
        """The name of the model that is served, or nothing yet."""
        served = (last.model for last in self._last.values() if last.model is not None)
        return next((facts.model for facts in served), "")

    def _admit(self, delivery: Delivery) -> None:
        message = codec.decode(delivery.data)
        if not isinstance(message, Announce):
            return
        before = self._last.get(message.name)
        if before is None and len(self._last) >= SERVICE_COUNT_MAX:
            return
        self._last[message.name] = message
        if before is None or before.state != message.state:
            self._on_change(message.name, message.state)
