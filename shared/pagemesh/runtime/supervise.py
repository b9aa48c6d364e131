"""Restarting what crashes, up to a limit; and calling actions once a period, or when they are due.

A life is a coroutine function. When it returns, its supervisor returns; when it raises, it is
started anew after a pause, until it has crashed ``crash_count_max`` times within ``window_ms``.
Then ``CrashLoop`` ends the task group and with it the process: what happens next is up to the
process that started it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pagemesh.runtime.clock import Clock, MonotonicClock, to_multiple
from pagemesh.runtime.logs import get_logger
from pagemesh.wire.errors import ConfigError, PagemeshError

_PATIENCE_MS_MIN = 1
_TOGETHER_MS = 250
"""If the patience is at least this long, calls come at multiples of it (see ``to_next_s``)."""
_log = get_logger(__name__)


class CrashLoop(PagemeshError):
    """Something crashed too often; its last error is the cause."""


@dataclass(frozen=True, slots=True)
class CrashLimit:
    crash_count_max: int = 5
    window_ms: int = 30_000
    pause_ms: int = 50
    """Before the second life; doubles with each crash in the window."""


DEFAULT_LIMIT = CrashLimit()


async def supervise(
    name: str,
    life: Callable[[], Awaitable[None]],
    *,
    limit: CrashLimit = DEFAULT_LIMIT,
    clock: Clock | None = None,
) -> None:
    """Run ``life`` until it returns. Raises ``CrashLoop``, or ``ConfigError`` at once, since no
    restart fixes a setting. Run it as a named child of a ``TaskGroup``."""
    now = clock if clock is not None else MonotonicClock()
    crashes: deque[int] = deque()
    while True:
        try:
            await life()
            return
        except ConfigError:
            raise
        except Exception as error:
            crashes.append(now.now_ms())
            while crashes[0] <= crashes[-1] - limit.window_ms:
                crashes.popleft()
            _log.error("supervise.crashed", life=name, crashes=len(crashes), error=error)
            if len(crashes) >= limit.crash_count_max:
                raise CrashLoop(
                    f"{name} crashed {len(crashes)} times within {limit.window_ms} ms"
                ) from error
            await asyncio.sleep(limit.pause_ms * 2 ** (len(crashes) - 1) / 1_000)


def to_next_s(period_ms: int) -> float:
    """Seconds until the loop's clock, which is the monotonic one, shows a multiple of
    ``period_ms`` (see ``to_multiple``)."""
    return to_multiple(asyncio.get_running_loop().time(), period_ms / 1_000)


async def every(period_ms: int, action: Callable[[], None]) -> None:
    """Call ``action`` once a period, for ever. Periods missed by a busy loop are skipped, not
    made up for."""
    while True:
        await asyncio.sleep(to_next_s(period_ms))
        action()


class Ticks:
    """Calls ``action`` whenever ``patience_ms()`` have passed since the last call. That number may
    change with any event, so call ``stir`` after each. A service with nothing to wait for is
    hardly ever woken."""

    def __init__(self, patience_ms: Callable[[], float], action: Callable[[], None]) -> None:
        self._patience_ms = patience_ms
        self._action = action
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def start(self) -> None:
        """Begin to call ``action``; the first call comes when it is due."""
        self._last_s = self._loop.time()
        self._arm(self._next_s())

    def stop(self) -> None:
        """Make no more calls. Doing so twice is harmless."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stir(self) -> None:
        """Call earlier if there is less patience by now. More patience counts only from the next
        call on, so that no timer is set in between."""
        due_s = self._next_s()
        if self._timer is not None and due_s < self._due_s:
            self._timer.cancel()
            self._arm(max(due_s, self._loop.time()))

    def _next_s(self) -> float:
        patience_ms = max(self._patience_ms(), _PATIENCE_MS_MIN)
        due_s = self._last_s + patience_ms / 1_000
        # An early call does no harm, and other processes wake at that moment anyway.
        return due_s if patience_ms < _TOGETHER_MS else due_s - due_s % (_TOGETHER_MS / 1_000)

    def _arm(self, due_s: float) -> None:
        self._due_s = due_s
        self._timer = self._loop.call_at(due_s, self._fire)

    def _fire(self) -> None:
        self._last_s = self._loop.time()
        self._action()
        if self._timer is not None:  # the action may have called ``stop``
            self._arm(self._next_s())
