"""How a door closes: running calls may finish; clients still waiting at the end are told so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection

from pagemesh.gateway.actor import GatewayActor

TOLD_S_MAX = 0.5
"""For the last messages to clients once the time is up."""


@contextlib.asynccontextmanager
async def finished(
    gateway: GatewayActor, tasks: Collection[asyncio.Task[None]]
) -> AsyncIterator[None]:
    """At the end of the context, wait for the ``tasks`` that exist then. If the context or the wait
    is cancelled, cut off all calls of the gateway at once: nobody cancels a second time."""
    try:
        yield
        await _end_of(tasks)
    except BaseException:
        gateway.cut_off()
        await _end_of(tasks, TOLD_S_MAX)
        for task in tuple(tasks):
            task.cancel()
        await _end_of(tasks, TOLD_S_MAX)  # calls that are no requests yet send their last message
        raise


async def _end_of(tasks: Collection[asyncio.Task[None]], s_max: float | None = None) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=s_max)
