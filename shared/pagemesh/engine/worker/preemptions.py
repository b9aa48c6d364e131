"""Warns people of sequences that lost their pages, with what helps. Under pressure there are dozens
a second, alike but for their names: after one of a reason the others are counted for a while."""

from __future__ import annotations

from pagemesh.engine.worker.events import Preempted
from pagemesh.runtime.logs import get_logger

PERIOD_US = 10_000_000
_log = get_logger(__name__)


def remedy(reason: str) -> str:
    """What helps against a sequence's losing its pages, for people."""
    match reason:
        case "preempted":
            return "raise PAGEMESH_POOL_BYTES, or lower PAGEMESH_SEQUENCE_COUNT_MAX"
        case "revoked":  # seen in the pool before the pager said why
            return "after an invalidation none is needed; otherwise raise PAGEMESH_POOL_BYTES"
        case _:
            return "none: the sequence is admitted again, and goes on where it was"


class Preemptions:
    def __init__(self) -> None:
        self._told_us: dict[str, int] = {}
        """By reason, when it was told last."""
        self._untold: dict[str, int] = {}

    def heard(self, event: Preempted, now_us: int) -> None:
        """``untold``: so many before it, of its reason, were not in the log."""
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
