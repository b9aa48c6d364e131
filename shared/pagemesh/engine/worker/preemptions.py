"""Logs a warning, with a remedy, when a sequence loses its pages. Under memory pressure there are
dozens a second that differ only in the request: once one is logged, others with the same reason are
only counted for ``PERIOD_US``."""

from __future__ import annotations

from pagemesh.engine.worker.events import Preempted
from pagemesh.runtime.logs import get_logger

PERIOD_US = 10_000_000
_RAISE = (
    "raise PAGEMESH_POOL_BYTES (restart the pager, and stop all workers of its host before they "
    "are started again)"
)
_log = get_logger(__name__)


def remedy(reason: str) -> str:
    """Advice to operators whose sequences lose their pages for ``reason``."""
    match reason:
        case "preempted":
            return f"{_RAISE}, or lower PAGEMESH_SEQUENCE_COUNT_MAX"
        case "revoked":  # seen in the pool before the pager said why
            return f"none needed after an invalidation; otherwise {_RAISE}"
        case _:
            return "none needed: the sequence is admitted again and continues where it was"


class Preemptions:
    def __init__(self) -> None:
        self._told_us: dict[str, int] = {}
        """When each reason was last logged."""
        self._untold: dict[str, int] = {}

    def heard(self, event: Preempted, now_us: int) -> None:
        """Log or count ``event``. ``untold`` in the log: how many before it, with the same reason,
        were only counted."""
        told_us = self._told_us.get(event.reason)
        if told_us is not None and now_us - told_us < PERIOD_US:
            self._untold[event.reason] = self._untold.get(event.reason, 0) + 1
            return
        self._told_us[event.reason] = now_us
        _log.warning(
            "worker.preempted", request=event.key.request, choice=event.key.choice,
            lost_tokens=event.lost_tokens, reason=event.reason, usage=event.usage,
            untold=self._untold.pop(event.reason, 0), remedy=remedy(event.reason),
        )  # fmt: skip
