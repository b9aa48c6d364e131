"""When to start a dead child again. Pure: exits and times in, a decision out.

A first death is answered at once, repeated ones with a pause that doubles; a child that keeps
dying is given up, because a crash loop helps nobody and hides its reason.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """``exit_count_max`` deaths within ``window_ms`` are one too many."""

    exit_count_max: int = 12
    window_ms: int = 60_000
    pause_ms_first: int = 100
    pause_ms_max: int = 2_000


@dataclass(frozen=True, slots=True)
class Restart:
    after_ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    exit_count: int
    within_ms: int


class RestartCore:
    """The deaths of one child. ``check`` raises when the bounds are broken."""

    __slots__ = ("_exits_ms", "_limits")

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._exits_ms: deque[int] = deque(maxlen=limits.exit_count_max)

    def exited(self, now_ms: int) -> Restart | GiveUp:
        """The child died at ``now_ms`` (monotonic)."""
        limits = self._limits
        while self._exits_ms and now_ms - self._exits_ms[0] >= limits.window_ms:
            self._exits_ms.popleft()
        self._exits_ms.append(now_ms)
        count = len(self._exits_ms)
        if count >= limits.exit_count_max:
            return GiveUp(count, now_ms - self._exits_ms[0])
        if count == 1:
            return Restart(0)
        doubled = limits.pause_ms_first << min(count - 2, 16)
        return Restart(min(limits.pause_ms_max, doubled))

    def check(self) -> None:
        assert len(self._exits_ms) <= self._limits.exit_count_max
        assert list(self._exits_ms) == sorted(self._exits_ms)
