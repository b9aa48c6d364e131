"""How people stop a mesh.

first signal     nothing new is taken, running requests may finish (the gateway drains first,
                 so everything they need is there until they have), then all stop in order
second signal    at once: every process is killed, and clients see their streams end early
"""

from __future__ import annotations

import asyncio
import signal

from pagemesh.cli.mesh.screen import Screen
from pagemesh.cli.mesh.supervisor import Supervisor

KILL_MARGIN_MS = 2_000
"""A service ends itself when its drain limit is over; one that does not even do that is killed
so much later."""
_PATIENCE_S = 1.0
"""An idle mesh is gone by then, unless its processor is busy; after it people are told who has
still to end, be it with an answer to finish or not."""


def stop_signals(mesh: Supervisor, screen: Screen) -> asyncio.Event:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; a second one kills the mesh. The
    handlers stay: stopping in order must not be cut short by an impatient Ctrl-C. Under ``nohup``,
    which has SIGHUP ignored, a terminal that closes stops nothing."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask() -> None:
        if stop.is_set():
            screen.line("stopping at once: running requests are cut off")
            mesh.kill()
        stop.set()

    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    for number in (signal.SIGINT, signal.SIGTERM, *hang_up):
        loop.add_signal_handler(number, ask)
    return stop


async def drain(mesh: Supervisor, screen: Screen, *, drain_ms: int) -> None:
    """Stop in order; each service has ``drain_ms`` to finish what it has."""
    screen.line("stopping")

    def tell() -> None:
        if mesh.killed:
            return
        names = ", ".join(mesh.stopping_names) or "a service"
        screen.line(
            f"waiting for {names} to end, up to {drain_ms / 1_000:g} s; Ctrl-C again stops at once"
        )

    telling = asyncio.get_running_loop().call_later(_PATIENCE_S, tell)
    try:
        await mesh.stop(drain_ms + KILL_MARGIN_MS)
    finally:
        telling.cancel()
