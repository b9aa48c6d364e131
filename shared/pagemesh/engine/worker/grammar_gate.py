"""Where requests wait until their grammar is compiled, which may take a second. Neither the core
nor the step thread ever waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pagemesh.engine.grammars import Grammars
from pagemesh.runtime.bus import Delivery
from pagemesh.wire.errors import Fault


@dataclass(frozen=True, slots=True)
class Compiled:
    """The grammar of the ``Submit`` or ``Attach`` in ``delivery``, which came at ``came_us``, is
    compiled."""

    delivery: Delivery
    came_us: int


class GrammarGate:
    """``admit`` gets a delivery again once it may pass; ``track`` gets the task meanwhile."""

    def __init__(
        self,
        grammars: Grammars,
        admit: Callable[[Compiled], None],
        track: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._grammars = grammars
        self._admit = admit
        self._track = track

    def holds(self, delivery: Delivery, grammar: str, came_us: int) -> bool:
        """Whether ``delivery`` has to wait. If its grammar cannot be compiled, it is refused."""
        if not grammar or self._grammars.has(grammar):
            return False
        compiling = self._compile(delivery, grammar, came_us)
        self._track(asyncio.create_task(compiling, name="worker-grammar"))
        return True

    async def _compile(self, delivery: Delivery, grammar: str, came_us: int) -> None:
        try:
            await asyncio.to_thread(self._grammars.begun, grammar)
        except Fault as fault:
            delivery.respond_error(fault)
        else:
            self._admit(Compiled(delivery, came_us))
