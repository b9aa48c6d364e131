"""How people stop a mesh.

first signal     no new requests are taken, and running ones may finish (the gateway drains first,
                 so that everything they need is there until then); then all stop in order
second signal    every process is killed at once, and clients see their streams end early
"""

from __future__ import annotations

import asyncio
import signal

from pagemesh.cli.mesh.screen import Screen
from pagemesh.cli.mesh.supervisor import Supervisor

KILL_MARGIN_MS = 2_000
"""A service ends itself at the end of its drain limit; one that does not is killed this much
later."""
_PATIENCE_S = 1.0
"""After this time, the services that are still running are named. An idle mesh has normally ended
by then."""


def stop_signals(mesh: Supervisor, screen: Screen) -> asyncio.Event:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; a second one kills the mesh. The
    handlers remain installed, so that an impatient Ctrl-C does not interrupt the orderly stop
    itself. Under ``nohup``, which ignores SIGHUP, closing the terminal stops nothing."""
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
    """Stop in order; each service has ``drain_ms`` to finish its work."""
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
