"""How a door ends: what it took may finish; whoever waits when the time is over is told so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection

from pagemesh.gateway.actor import GatewayActor

TOLD_S_MAX = 0.5
"""For the last words to clients once the time is over."""


@contextlib.asynccontextmanager
async def finished(
    gateway: GatewayActor, tasks: Collection[asyncio.Task[None]]
) -> AsyncIterator[None]:
    """At the end of the context wait for ``tasks``, those that are there then. Where the context or
    the wait is cancelled, nobody will do so a second time: all calls of the gateway are cut off."""
    try:
        yield
        await _end_of(tasks)
    except BaseException:
        gateway.cut_off()
        await _end_of(tasks, TOLD_S_MAX)
        for task in tuple(tasks):
            task.cancel()
        await _end_of(tasks, TOLD_S_MAX)  # a call that is no request yet says its last words now
        raise


async def _end_of(tasks: Collection[asyncio.Task[None]], s_max: float | None = None) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=s_max)
