"""What a request has for its client, until a door takes it."""

from __future__ import annotations

import asyncio

from pagemesh.gateway.calls import events as ev

OUTBOX_EVENTS_MAX = 4_096
OUTBOX_CHARACTERS_MAX = 1 << 20

ForClient = ev.Deliver | ev.ChoiceEnded | ev.PromptScored | ev.Ended


class Outbox:
    """Events not yet sent to the client; one reader. The bounds do not apply while it waits, since
    it had no chance to take anything: one turn may bring a beam search's whole answer."""

    def __init__(
        self,
        *,
        events_max: int = OUTBOX_EVENTS_MAX,
        characters_max: int = OUTBOX_CHARACTERS_MAX,
    ) -> None:
        self._events_max = events_max
        self._characters_max = characters_max
        self._events: list[tuple[int, ForClient]] = []
        self._characters = 0
        self._reader: asyncio.Future[None] | None = None

    def put(self, prompt_index: int, event: ForClient) -> bool:
        """False: the reader is too slow, and ``event`` was dropped. ``Ended`` is always taken."""
        ended = isinstance(event, ev.Ended)
        size = len(event.text) if isinstance(event, ev.Deliver) else 0
        full = len(self._events) >= self._events_max
        full = full or self._characters + size > self._characters_max
        if full and not ended and self._reader is None:
            return False
        self._events.append((prompt_index, event))
        self._characters += size
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        return True

    async def take(self) -> list[tuple[int, ForClient]]:
        """Wait for at least one event, then take all there are, in order."""
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        taken, self._events = self._events, []
        self._characters = 0
        return taken
