"""Many requests to one server: at a fixed concurrency, or at given times."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pagemesh.cli.benching.client import Reply, RequestFailedError, Server, complete


@dataclass(slots=True)
class Outcome:
    """The replies, the reasons of failed requests, and the time it all took. ``stopped``: the run
    was cancelled before all requests were sent."""

    replies: list[Reply] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    stopped: bool = False


async def ask_all(
    server: Server,
    todo: Iterable[tuple[float, list[int]]],
    output_tokens: int,
    *,
    concurrency: int | None = None,
    on_end: Callable[[], object],
) -> Outcome:
    """Ask for answers of exactly ``output_tokens`` to the prompts of ``todo``. Each is sent when
    its time (seconds after the start) has come and fewer than ``concurrency`` others are in flight
    (None: no limit). ``on_end`` is called after each. When cancelled, returns what it has by
    then."""
    outcome = Outcome()
    places = asyncio.Semaphore(concurrency or sys.maxsize)
    started_s = time.perf_counter()

    async def ask(prompt: list[int]) -> None:
        try:
            outcome.replies.append(await complete(server, prompt, output_tokens))
        except RequestFailedError as error:
            outcome.failures.append(str(error))
        places.release()
        on_end()

    try:
        async with asyncio.TaskGroup() as group:
            for moment_s, prompt in todo:
                await asyncio.sleep(max(0.0, started_s + moment_s - time.perf_counter()))
                await places.acquire()
                group.create_task(ask(prompt))
    except asyncio.CancelledError:
        outcome.stopped = True
    outcome.wall_s = time.perf_counter() - started_s
    return outcome
