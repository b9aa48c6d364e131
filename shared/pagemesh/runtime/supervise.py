"""Restarting what crashes, up to a limit; and doing things once a period.

A life is a coroutine function. When it returns, its supervisor returns; when it raises, it is
started anew after a pause, until it has crashed ``crash_count_max`` times within ``window_ms``.
Then ``CrashLoop`` ends the task group and with it the process: whoever started it knows best.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pagemesh.runtime.clock import Clock, MonotonicClock
from pagemesh.runtime.logs import get_logger
from pagemesh.wire.errors import ConfigError, PagemeshError

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
    """Live until ``life`` returns. Raises ``CrashLoop``, or ``ConfigError`` at once, since no
    restart mends a setting. Run it as a named child of a ``TaskGroup``."""
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


async def every(period_ms: int, action: Callable[[], None]) -> None:
    """Call ``action`` once a period, for ever. Periods missed by a busy loop are skipped, not
    made up for."""
    loop = asyncio.get_running_loop()
    due = loop.time() + period_ms / 1_000
    while True:
        await asyncio.sleep(max(0.0, due - loop.time()))
        action()
        due = max(due + period_ms / 1_000, loop.time())
