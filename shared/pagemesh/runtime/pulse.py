"""Signs of life for the process that started this one: a byte now and then, written by the event
loop. A loop that is frozen or blocked falls silent."""

from __future__ import annotations

import contextlib
import os

from pagemesh.runtime.supervise import every

PULSE_PERIOD_MS = 500


async def beat(descriptor: int) -> None:
    """Write to the pipe ``descriptor`` until cancelled, whether or not anybody reads: a full or
    broken pipe does no harm."""
    os.set_inheritable(descriptor, False)
    os.set_blocking(descriptor, False)

    def once() -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(descriptor, b".")

    once()
    await every(PULSE_PERIOD_MS, once)
