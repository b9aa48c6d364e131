"""When to restart a dead child. Pure: lives in, a decision out.

After its first death a child is restarted at once, after further ones with a pause that doubles. A
child that keeps dying is given up, because a crash loop helps nobody and hides its cause. Deaths
are not counted per time, since some children run for seconds before they reach what kills them;
instead, a life that was long enough resets the count. A child that is killed from outside now and
then lives that long in between, and is restarted for ever. One that is killed more often is given
up even if it served each time: whether a life got as far as serving is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """A child is given up at its ``exit_count_max``-th death without a life of at least
    ``life_ms_min`` in between."""

    exit_count_max: int = 12
    life_ms_min: int = 15_000
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
    """Counts the deaths of one child. ``check`` asserts the bounds."""

    __slots__ = ("_count", "_first_ms", "_limits")

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._count = 0
        self._first_ms = 0

    def exited(self, born_ms: int, now_ms: int) -> Restart | GiveUp:
        """The child that was started at ``born_ms`` died at ``now_ms`` (both monotonic)."""
        limits = self._limits
        if now_ms - born_ms >= limits.life_ms_min:
            self._count = 0
        if not self._count:
            self._first_ms = now_ms
        self._count += 1
        if self._count >= limits.exit_count_max:
            return GiveUp(self._count, now_ms - self._first_ms)
        if self._count == 1:
            return Restart(0)
        doubled = limits.pause_ms_first << min(self._count - 2, 16)
        return Restart(min(limits.pause_ms_max, doubled))

    def waits(self) -> Restart:
        """The child ended for a cause outside the mesh, such as a server's certificate or a full
        disk. It is retried without limit, and not counted as a death."""
        return Restart(self._limits.pause_ms_max)

    def check(self) -> None:
        assert 0 <= self._count <= self._limits.exit_count_max
