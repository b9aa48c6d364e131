"""Logs the progress of loading a model."""

from __future__ import annotations

import time

from pagemesh.engine.checkpoint import Progress
from pagemesh.runtime.logs import get_logger

_PERIOD_S = 0.5
_log = get_logger(__name__)


def logged_progress() -> Progress:
    """Logs at most one line per period, and none if loading is quick."""
    due = time.monotonic() + _PERIOD_S

    def report(stage: str, done_bytes: int, total_bytes: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _PERIOD_S
            percent = 100 * done_bytes // max(total_bytes, 1)
            _log.info("worker.model_loading", stage=stage, percent=percent)

    return report
