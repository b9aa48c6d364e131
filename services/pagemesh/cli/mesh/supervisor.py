"""All children of one mesh: started in stages, kept alive, stopped in reverse order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from pagemesh.cli.mesh.children import Changed, Child, ChildLimits, ChildSpec, Line
from pagemesh.runtime.clock import Clock, MonotonicClock
from pagemesh.wire.errors import PagemeshError

_WORDS_MS = 1_500
"""The part of the time to stop that children keep for telling their clients (twice the gateway's
``TOLD_S_MAX``, and the time it takes to exit)."""


class Supervisor:
    """The children and the first failure that ends the mesh."""

    def __init__(self, children: Iterable[Child], failure: asyncio.Future[PagemeshError]) -> None:
        self.children = tuple(children)
        self._failure = failure
        self.killed = False
        """``kill`` was called, so no child is waited for any more."""

    @property
    def stopping_names(self) -> list[str]:
        """The children that were asked to stop and still run."""
        return [child.spec.name for child in self.children if child.is_stopping]

    async def failed(self) -> PagemeshError:
        """Wait for the failure of a child that cannot be restarted."""
        return await asyncio.shield(self._failure)

    async def stop(self, grace_ms: int, *, words_ms: int = 0) -> None:
        """Stop the highest stage first, so that no service loses one that it still needs. See
        ``Child.stop``."""
        for stage in sorted({child.spec.stage for child in self.children}, reverse=True):
            members = [child for child in self.children if child.spec.stage == stage]
            await asyncio.gather(*(child.stop(grace_ms, words_ms=words_ms) for child in members))

    def kill(self) -> None:
        self.killed = True
        for child in self.children:
            child.kill()


@asynccontextmanager
async def supervised(
    specs: Iterable[ChildSpec],
    *,
    limits: ChildLimits,
    grace_ms: int,
    on_line: Line,
    on_change: Changed,
    clock: Clock | None = None,
) -> AsyncIterator[Supervisor]:
    """Children that run inside the ``async with`` and are gone after it. A ``PagemeshError``
    of the body comes out as itself, not as a group."""
    failure: asyncio.Future[PagemeshError] = asyncio.get_running_loop().create_future()

    def fail(error: PagemeshError) -> None:
        if not failure.done():
            failure.set_result(error)

    children = [
        Child(
            spec, clock or MonotonicClock(), limits,
            on_line=on_line, on_change=on_change, on_failure=fail,
        )
        for spec in sorted(specs, key=lambda spec: spec.stage)
    ]  # fmt: skip
    supervisor = Supervisor(children, failure)
    ended_by: PagemeshError | None = None
    async with asyncio.TaskGroup() as group:
        for child in children:
            group.create_task(child.tend(), name=child.spec.name)
        try:
            yield supervisor
        except PagemeshError as error:
            ended_by = error
        finally:
            # ``grace_ms`` is less than the drain limit, so services have to be told in time to cut
            # off running answers; otherwise they would be killed in the middle of them.
            await supervisor.stop(grace_ms, words_ms=_WORDS_MS)
    if ended_by is not None:
        raise ended_by
