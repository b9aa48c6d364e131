"""Whether a child still answers. Pure: beats and looks with their times in, a verdict out.

A death is noticed by itself; a process that hangs shows only by its silence. Silence is counted in
the watcher's own looks, so time in which it did not look hardly counts: after the machine slept, or
this process was stopped, a child has lost only a look or two of its patience.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """``first_ms_max`` applies until the first beat, since imports from a cold disk take long;
    ``silence_ms_max`` after it. ``look_ms`` is the time between looks."""

    silence_ms_max: int = 10_000
    first_ms_max: int = 120_000
    look_ms: int = 500


class WatchCore:
    """One life of a child."""

    __slots__ = ("_beaten", "_limits", "_looked_ms", "_silence_ms")

    def __init__(self, limits: WatchLimits, now_ms: int) -> None:
        self._limits = limits
        self._looked_ms = now_ms
        self._silence_ms = 0
        self._beaten = False

    @property
    def patience_ms(self) -> int:
        """How long a silence is tolerated now."""
        limits = self._limits
        if self._beaten:
            return limits.silence_ms_max
        return max(limits.first_ms_max, limits.silence_ms_max)

    def beat(self) -> None:
        """A sign of life."""
        self._beaten = True
        self._silence_ms = 0

    def look(self, now_ms: int) -> bool:
        """Whether the child has been silent for too long (``now_ms`` is monotonic)."""
        self._silence_ms += min(now_ms - self._looked_ms, 2 * self._limits.look_ms)
        self._looked_ms = now_ms
        return self._silence_ms > self.patience_ms

    def check(self) -> None:
        """Raises ``AssertionError`` when an invariant is broken."""
        assert self._silence_ms >= 0, "a clock went backwards"
