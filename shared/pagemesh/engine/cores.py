"""How many cores a step may use: those of this process, or as many as a CPU quota allows.

``taskset`` and cpusets take cores away, which shows in the process's affinity. A quota (``cpus`` of
compose, ``--cpus`` of docker, ``CPUQuota`` of systemd) leaves all cores visible but limits time:
once a control group has used up its time, all of its threads are throttled until the next period.
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
    ``quota``: how many cores' worth of time it may use, infinite if unlimited."""

    host_count: int
    own_count: int
    quota: float

    @property
    def thread_count(self) -> int:
        """Threads of a step, at least one. A quota is rounded down: a thread that the quota does
        not cover in full is throttled, and all others are throttled with it or wait for it at the
        next barrier. The remainder is left to threads that do not compute."""
        return max(1, math.floor(min(self.own_count, self.quota)))

    def __str__(self) -> str:
        count = self.thread_count
        of = f" of {self.host_count}" if count < self.host_count else ""
        told = f"{count}{of} core{'s' if self.host_count > 1 else ''}"
        if self.quota < self.own_count:
            told += f", the CPU quota allows {self.quota:g}"
        return told


def usable_cores() -> UsableCores:
    """The cores that this process may use at this moment."""
    host_count = os.cpu_count() or 1
    own_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host_count
    return UsableCores(host_count, own_count, cpu_quota())


def cpu_quota(own: Path = _OWN, mounts: Path = _MOUNTS) -> float:
    """How many cores' worth of time this process may use: the smallest limit among its control
    groups and their ancestors, all of which apply; infinite if there is none. ``own``: the file
    that names the groups, one line ``id:controllers:path`` per hierarchy; ``mounts``: where
    hierarchies are mounted."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return math.inf  # a system without control groups
    quotas = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # cgroup v2: one hierarchy for all controllers.
            quotas += [_quota(_words(group / "cpu.max")) for group in _groups(mounts, path)]
        elif "cpu" in controllers.split(","):
            for group in _groups(mounts / "cpu", path):
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quotas.append(_quota([word for name in names for word in _words(group / name)]))
    return min(quotas)


def _groups(mount: Path, path: str) -> Iterator[Path]:
    """The folders of the group at ``path`` and of its ancestors. In a container ``path`` may be the
    host's while only the group itself is mounted, at ``mount``: then the other folders do not
    exist."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts) + 1):
        yield mount.joinpath(*parts[:depth])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []  # neither the root group nor a group without this controller has the file


def _quota(words: list[str]) -> float:
    """``words``: microseconds allowed per period (``max`` or -1: no limit), and the period."""
    match words:
        case [allowed_us, period_us] if allowed_us.isdecimal():
            return int(allowed_us) / int(period_us)
        case _:
            return math.inf
