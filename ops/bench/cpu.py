"""What processes use of the processor."""

from __future__ import annotations

from collections.abc import Mapping

import psutil


def cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """Processor time of each process so far, by its name in ``pids``."""
    times = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items()}
    return {name: used.user + used.system for name, used in times.items()}
