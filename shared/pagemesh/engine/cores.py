"""How many cores a step may use: those of this process, or what a CPU quota allows of them.

``taskset`` and cpusets take cores away, which the process's affinity shows. A quota (``cpus`` of
compose, ``--cpus`` of docker, ``CPUQuota`` of systemd) shows all of them and takes time away: when
a control group has used its time up, all of its threads stand still until the next period.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_MOUNTS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class UsableCores:
    """``host_count``: cores of the machine; ``own_count``: those that this process may run on;
    ``quota``: how many cores' time it may use, infinite where that is not bounded."""

    host_count: int
    own_count: int
    quota: float

    @property
    def thread_count(self) -> int:
        """Threads of a step, at least one. A quota is rounded down: a thread that it does not pay
        for in full is throttled, and all others wait for it, or with it, at the next barrier. What
        is left over is for the threads that do not compute."""
        return max(1, math.floor(min(self.own_count, self.quota)))

    def __str__(self) -> str:
        count = self.thread_count
        of = f" of {self.host_count}" if count < self.host_count else ""
        told = f"{count}{of} core{'s' if self.host_count > 1 else ''}"
        if self.quota < self.own_count:
            told += f", the CPU quota allows {self.quota:g}"
        return told


def usable_cores() -> UsableCores:
    """Those of this process, from now on as they are now."""
    host_count = os.cpu_count() or 1
    own_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host_count
    return UsableCores(host_count, own_count, cpu_quota())


def cpu_quota(own: Path = _OWN, mounts: Path = _MOUNTS) -> float:
    """How many cores' time this process may use: the least of what its control groups and those
    above them allow, since they all hold; infinite where none bounds it. ``own``: names the groups,
    a line ``id:controllers:path`` for each hierarchy; ``mounts``: where hierarchies are mounted."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return math.inf  # a system without control groups
    quotas = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # The second version has one hierarchy for all controllers.
            quotas += [_quota(_words(group / "cpu.max")) for group in _groups(mounts, path)]
        elif "cpu" in controllers.split(","):
            for group in _groups(mounts / "cpu", path):
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quotas.append(_quota([word for name in names for word in _words(group / name)]))
    return min(quotas)


def _groups(mount: Path, path: str) -> Iterator[Path]:
    """The group of ``path`` and those above it. In a container ``path`` may be the host's while
    only the group itself is mounted, as ``mount``: then the others are not there."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts) + 1):
        yield mount.joinpath(*parts[:depth])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []  # the topmost group has no such file, nor has one without this controller


def _quota(words: list[str]) -> float:
    """``words``: microseconds of a period and how long that is; ``max`` or -1: no bound."""
    match words:
        case [allowed_us, period_us] if allowed_us.isdecimal():
            return int(allowed_us) / int(period_us)
        case _:
            return math.inf
