"""Notices that a ``Frames`` message was lost, by the counter of its worker.

Every worker incarnation counts its ``Frames`` messages to us from 1, and from 1 again once it has
forgotten us; a message without frames repeats the last count. What a message contains is for the
requests to judge (they drop repeated tokens); this only detects that one is missing. Pure.
"""

from __future__ import annotations

from pagemesh.gateway.calls.events import Worker
from pagemesh.wire.work_messages import Frames


class FrameTracker:
    """The last count of every worker. Bounded by ``workers_max``: the worker that was silent for
    longest is forgotten first, at the cost of one needless request for lost frames."""

    def __init__(self, *, workers_max: int = 4_096) -> None:
        self._workers_max = workers_max
        self._last: dict[Worker, int] = {}

    def arrived(self, worker: Worker, message: Frames) -> int:
        """Take note of ``message`` from ``worker``; returns how many of its earlier messages are
        missing."""
        last = self._last.pop(worker, 0)
        counter = message.counter
        if counter < last:
            last = 0  # a connection keeps the order of its messages, so the count began anew
        self._last[worker] = counter
        if len(self._last) > self._workers_max:
            self._last.pop(next(iter(self._last)))
        expected = last + 1 if message.frames else last
        return max(0, counter - expected)

    def check(self) -> None:
        assert len(self._last) <= self._workers_max
