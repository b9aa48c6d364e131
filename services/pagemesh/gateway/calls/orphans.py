"""Frames that no request here waits for: when to tell their worker to stop. Pure.

An abort may be lost, or a gateway may have died before it sent one. The worker then keeps sending
frames, which is how the gateway notices.
"""

from __future__ import annotations


class Orphans:
    """A worker is told to stop a request at most once in ``quiet_ms``, and not sooner than that
    after the request ended here: the frames that crossed its own abort need no second one. Bounded
    by ``requests_max``; forgetting one costs a needless abort."""

    def __init__(self, *, quiet_ms: int = 1_000, requests_max: int = 4_096) -> None:
        self._quiet_ms = quiet_ms
        self._requests_max = requests_max
        self._quiet_until: dict[str, int] = {}

    def ended(self, request: str, now_ms: int) -> None:
        """``request`` has ended here, and every worker concerned was told."""
        self._quiet_until.pop(request, None)  # keeps the entries in order of time
        self._quiet_until[request] = now_ms + self._quiet_ms
        if len(self._quiet_until) > self._requests_max:
            del self._quiet_until[next(iter(self._quiet_until))]

    def heard(self, request: str, now_ms: int) -> bool:
        """A frame of ``request``, which no request here waits for, came in. True: tell its worker
        to stop."""
        if now_ms < self._quiet_until.get(request, 0):
            return False
        self.ended(request, now_ms)
        return True

    def check(self) -> None:
        assert len(self._quiet_until) <= self._requests_max
