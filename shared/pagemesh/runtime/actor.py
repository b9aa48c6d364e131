"""The actor: one bounded inbox, one task, one core at a time.

    admit --> [ inbox, bounded ] --> handle (one at a time) --> commands performed
      |                                 |
      Busy when full                    a crash: the event and all that is queued are refused,
      Absent when stopping              and a fresh behaviour starts under a crash limit

``admit`` may be called from anywhere on the event loop, above all from bus callbacks; it
never waits and never drops. ``stop`` drains: admitted events are handled, then the final event
given to ``stop``, and ``run`` returns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pagemesh.runtime.bus.messages import Delivery
from pagemesh.runtime.supervise import DEFAULT_LIMIT, CrashLimit, supervise
from pagemesh.wire.errors import Absent, Busy, Fault, Internal

E = TypeVar("E")
BUSY_RETRY_MS = 50
TURN_EVENTS_MAX = 64
"""Events handled in a row before the rest of the event loop has a turn."""


class Behaviour(Generic[E]):
    """What an actor does. A new one is made for each life, with a fresh core inside."""

    async def begin(self) -> None:
        """Before the first event of this life."""

    async def handle(self, event: E) -> None:
        """Decide and perform. An exception ends this life."""
        raise NotImplementedError

    def rest(self) -> None:
        """Do what is not worth doing after each event. Called when nothing is queued, before the
        rest of the event loop has its turn, and when a stop is done. An exception ends this life.
        """

    def refuse(self, event: E, fault: Fault) -> None:
        """Answer an event that will not be handled; may be called after ``end``. This default
        answers events that are deliveries."""
        if isinstance(event, Delivery):
            event.respond_error(fault)

    async def end(self) -> None:
        """After the last event of this life, whether a stop or a crash ends it."""


@dataclass(frozen=True, slots=True)
class ActorStatistics:
    queued_count: int
    queued_count_highest: int
    handled_count: int
    refused_count: int
    crash_count: int
    stopping: bool


class Actor(Generic[E]):
    """Run it as a named child of a ``TaskGroup``: ``group.create_task(actor.run())``."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Behaviour[E]],
        *,
        inbox_count_max: int,
        limit: CrashLimit = DEFAULT_LIMIT,
    ) -> None:
        self.name = name
        self._make = make
        self._inbox_count_max = inbox_count_max
        self._limit = limit
        self._queue: deque[E] = deque()
        self._wake = asyncio.Event()
        self._behaviour: Behaviour[E] | None = None
        self._stopping = False
        self._highest = 0
        self._handled = 0
        self._refused = 0
        self._crashes = 0

    def admit(self, event: E) -> None:
        """Queue an event. Raises ``Busy`` when the inbox is full, ``Absent`` when stopping."""
        if self._stopping:
            self._refused += 1
            raise Absent(f"{self.name} is stopping and accepts no new messages")
        if len(self._queue) >= self._inbox_count_max:
            self._refused += 1
            raise Busy(
                f"the inbox of {self.name} is full ({self._inbox_count_max} waiting)",
                retry_after_ms=BUSY_RETRY_MS,
            )
        self._queue.append(event)
        self._highest = max(self._highest, len(self._queue))
        self._wake.set()

    def try_admit(self, event: E) -> bool:
        """Like ``admit`` for events that may be skipped, such as ticks; False when refused."""
        try:
            self.admit(event)
        except (Busy, Absent):
            return False
        return True

    def stop(self, final: E | None = None) -> None:
        """Take nothing new; ``run`` returns when the queued events and then ``final`` have been
        handled. ``final`` is queued even if the inbox is full."""
        self._stopping = True
        if final is not None:
            self._queue.append(final)
        self._wake.set()

    async def run(self) -> None:
        """Handle events until stopped. Raises ``CrashLoop``."""
        try:
            await supervise(self.name, self._live, limit=self._limit)
        finally:
            self._stopping = True
            if self._queue:
                behaviour = self._behaviour if self._behaviour is not None else self._make()
                self._refuse_queued(behaviour, Absent(f"{self.name} has stopped"))

    def statistics(self) -> ActorStatistics:
        return ActorStatistics(
            len(self._queue),
            self._highest,
            self._handled,
            self._refused,
            self._crashes,
            self._stopping,
        )

    async def _live(self) -> None:
        behaviour = self._behaviour = self._make()
        try:
            await behaviour.begin()
            await self._serve(behaviour)
        except Exception:
            self._crashes += 1
            busy = Busy(f"{self.name} restarts", retry_after_ms=BUSY_RETRY_MS)
            self._refuse_queued(behaviour, busy)
            raise
        finally:
            await behaviour.end()

    async def _serve(self, behaviour: Behaviour[E]) -> None:
        while True:
            while not self._queue:
                self._wake.clear()
                behaviour.rest()
                if self._stopping:
                    return
                await self._wake.wait()
            event = self._queue.popleft()
            try:
                await behaviour.handle(event)
            except asyncio.CancelledError:
                self._refused += 1
                behaviour.refuse(event, Absent(f"{self.name} was stopped at this message"))
                raise
            except Exception:
                self._refused += 1
                behaviour.refuse(event, Internal(f"{self.name} failed on this message"))
                raise
            self._handled += 1
            if self._handled % TURN_EVENTS_MAX == 0:
                behaviour.rest()
                await asyncio.sleep(0)

    def _refuse_queued(self, behaviour: Behaviour[E], fault: Fault) -> None:
        # Only what is queued now: events admitted meanwhile belong to the next life.
        for _ in range(len(self._queue)):
            self._refused += 1
            behaviour.refuse(self._queue.popleft(), fault)
