"""CPU time of processes."""

from __future__ import annotations

from collections.abc import Mapping

import psutil


def cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """Seconds of CPU time that each process has used so far, by its name in ``pids``."""
    times = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items()}
    return {name: used.user + used.system for name, used in times.items()}
