"""Many requests of one server: so many at once, or at given moments."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pagemesh.cli.benching.client import Reply, RequestFailedError, Server, complete


@dataclass(slots=True)
class Outcome:
    """What came back, in what time; ``failures`` say why something did not. ``stopped``: somebody
    ended it before everything was asked."""

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
    """Answers of exactly ``output_tokens`` to all prompts ``todo``, each asked not before its
    moment, in seconds, and not while ``concurrency`` others are under way; None: however many.
    ``on_end`` is called after each. Whoever cancels this gets what is there by then."""
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
