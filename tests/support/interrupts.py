"""Ctrl-C for processes that tests start."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """For ``preexec_fn``. What a shell runs in the background ignores Ctrl-C, and so would all that
    it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
