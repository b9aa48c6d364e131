"""When to start a dead child again. Pure: lives in, a decision out.

A first death is answered at once, repeated ones with a pause that doubles; a child that keeps
dying is given up, because a crash loop helps nobody and hides its reason. How often it dies in a
time would not tell, since some take seconds to come as far as what kills them: a life that was long
enough makes up for the deaths before it, and nothing else does. Who is killed from outside now and
then lives so long in between, and is started again for ever. Who is killed more often is given up
though it served each time: whether a life came to serve is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """``exit_count_max`` deaths are one too many, if no life between them was ``life_ms_min``
    long."""

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
    """The deaths of one child. ``check`` raises when the bounds are broken."""

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
        """It ended for what others have to put right, such as a server's certificate or a full
        disk: it is tried without end, and that is no death."""
        return Restart(self._limits.pause_ms_max)

    def check(self) -> None:
        assert 0 <= self._count <= self._limits.exit_count_max
