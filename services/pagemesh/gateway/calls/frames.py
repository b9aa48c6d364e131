"""Which messages of each worker arrived: counts, so that a lost one is noticed.

Every worker incarnation counts its ``Frames`` messages to us from 1, and from 1 again when it
had forgotten us; a message without frames repeats the last count. What a message says is for the
requests to judge (a repeated token is dropped there); this only tells that something is missing.
Pure.
"""

from __future__ import annotations

from pagemesh.gateway.calls.events import Worker
from pagemesh.wire.work_messages import Frames


class FrameTracker:
    """The last count of every worker. Bounded by ``workers_max``: the one heard of longest
    ago is forgotten first, which costs one needless request for lost frames."""

    def __init__(self, *, workers_max: int = 4_096) -> None:
        self._workers_max = workers_max
        self._last: dict[Worker, int] = {}

    def arrived(self, worker: Worker, message: Frames) -> int:
        """Take note of ``message``, which came from ``worker``; says how many messages of it
        should have come before this one and did not."""
        last = self._last.pop(worker, 0)
        counter = message.counter
        if counter < last:
            last = 0  # what one connection sends to a subject is not overtaken: it counts anew
        self._last[worker] = counter
        if len(self._last) > self._workers_max:
            self._last.pop(next(iter(self._last)))
        expected = last + 1 if message.frames else last
        return max(0, counter - expected)

    def check(self) -> None:
        assert len(self._last) <= self._workers_max
