"""Time, as an argument. Cores are given ``now_ms``; actors read it from a ``Clock``.

Monotonic times order events within one host and are never compared between hosts. Wall time
serves traces, and tells which request came first (``came_us``), since gateways of several hosts
may use one pager. In traces it is the monotonic clock plus an offset taken once, so that a wall
clock that jumps distorts no span. Nothing expires by wall time.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Protocol

_WALL_OFFSET_NS = time.time_ns() - time.monotonic_ns()
_START_BYTES = 8
_UNKNOWN_START = bytes(_START_BYTES)


class Clock(Protocol):
    def now_us(self) -> int:
        """Monotonic microseconds."""
        ...

    def now_ms(self) -> int:
        """Monotonic milliseconds."""
        ...

    def wall_us(self) -> int:
        """Microseconds since 1970, by this host's clock."""
        ...


class MonotonicClock:
    """The host's monotonic clock; it does not run backwards and does not jump."""

    __slots__ = ()

    def now_us(self) -> int:
        return time.monotonic_ns() // 1_000

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wall_us(self) -> int:
        return time.time_ns() // 1_000


def came_us(clock: Clock, then_us: int) -> int:
    """The monotonic time ``then_us``, a moment ago, in microseconds since 1970 (0 if the wall clock
    is before that). It tells which of two requests came first, whatever hosts they came to. The
    wall clock is read each time, so that after it jumps the requests of all gateways of a host are
    soon in order again."""
    return max(0, clock.wall_us() - (clock.now_us() - then_us))


def to_multiple(now: float, period: float) -> float:
    """How long it is from ``now`` to a multiple of ``period``: the next one, or the one after if
    that is closer than a tenth of a period, since timers may be a little early. Periodic work of
    all processes of a host is done at such moments, so that they wake and rest together, and
    messages arrive while their recipient is awake."""
    left = period - now % period
    return left if left > period / 10 else left + period


class ManualClock:
    """A clock that moves only when told to, for tests and simulation. ``booted_us``: the wall time
    at its time 0."""

    __slots__ = ("_booted_us", "_now_us")

    def __init__(self, now_ms: int = 0, *, booted_us: int = 0) -> None:
        self._now_us = now_ms * 1_000
        self._booted_us = booted_us

    def now_us(self) -> int:
        return self._now_us

    def now_ms(self) -> int:
        return self._now_us // 1_000

    def wall_us(self) -> int:
        return self._booted_us + self._now_us

    def advance_ms(self, duration_ms: int) -> None:
        """Move forward. Raises ``ValueError`` for a negative duration."""
        if duration_ms < 0:
            raise ValueError(f"time does not run backwards ({duration_ms} ms)")
        self._now_us += duration_ms * 1_000


class HostTime:
    """Times that are still valid after a process has ended, for what it leaves behind. They are
    CLOCK_BOOTTIME, which all processes of a host share, which runs while the machine sleeps and
    which nobody can set."""

    def __init__(self) -> None:
        self.boot = _boot()
        """16 bytes that identify the boot of the machine and its clocks. Times under different
        values must not be compared."""

    def has_restarted(self, boot: bytes) -> bool:
        """Whether the machine was rebooted since ``boot`` was read; False if that is unknown."""
        now, then = self.boot[:_START_BYTES], boot[:_START_BYTES]
        return now != then and _UNKNOWN_START not in (now, then)

    def kept_ms(self, clock_ms: int) -> int:
        """The host time of a ``MonotonicClock`` time. A pause of the process in here makes it
        earlier, never later."""
        host_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        return clock_ms + (host_ns - time.monotonic_ns()) // 1_000_000

    def clock_ms(self, kept_ms: int) -> int:
        """The ``MonotonicClock`` time of a host time; a pause likewise never makes it later."""
        clock_ns = time.monotonic_ns()
        return kept_ms - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - clock_ns) // 1_000_000


def _boot() -> bytes:
    """Identifies the boot of the machine, and then the clocks that count from it."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return _UNKNOWN_START + os.urandom(8)  # no other process is known to share the clock
    try:
        space = os.readlink("/proc/self/ns/time")  # a container may have clocks of its own
    except OSError:
        clocks = os.urandom(8)
    else:
        clocks = hashlib.sha256(f"{started} {space}".encode()).digest()[:8]
    return hashlib.sha256(started.encode()).digest()[:_START_BYTES] + clocks


def wall_ns(monotonic_us: int) -> int:
    """A ``MonotonicClock`` time of this host in nanoseconds since 1970, for spans."""
    return monotonic_us * 1_000 + _WALL_OFFSET_NS
