"""Aims of figures that several benchmarks report, and how a value compares with its aim."""

from __future__ import annotations

from collections.abc import Mapping

OF_FLOOR: Mapping[str, float] = {
    "batch 1": 0.85,
    "batch 8": 0.75,
    "batch 32": 0.60,
    "prefill 512": 0.75,
}
"""Minimum share of a step's floor, by case of ``bench_step``."""
OF_STREAM = 0.75
"""Minimum for attention to float32 K and V, as a share of streaming the same pool."""
OVER_FLOAT32: Mapping[str, float] = {"float16": 1.6, "int8": 2.0}
"""Minimum speed relative to float32 K and V, by type."""
DETERMINISTIC_SLOWDOWN = 1.10
"""Maximum duration relative to a run without ``--deterministic``."""
OUTSIDE_STEPS: Mapping[str, float] = {"S": 0.15, "M": 0.05}
"""Maximum share of a decode step's time that Python and the bus take, by model."""
OVER_IN_PROCESS = 1.10
"""Maximum time to first token of a cache hit relative to the worker loop in process, for models so
slow that this allows more than the aim in milliseconds."""
SPEED_OF_MODEL: Mapping[str, float] = {"L": 1.2}
"""Minimum tokens a second relative to the best peer, for any workload. The aim of other models
depends on the workload (``serving.workloads``)."""


def is_slow(in_process_ms: float, over_ms: float) -> bool:
    """Whether ``OVER_IN_PROCESS`` allows more than ``over_ms`` on top of ``in_process_ms``."""
    return in_process_ms * (OVER_IN_PROCESS - 1) > over_ms


def of_aim(value: float, aim: float, *, at_least: bool = False) -> str:
    """How ``value`` compares with ``aim``, which is a maximum, or a minimum if ``at_least``."""
    is_missed = value < aim if at_least else value > aim
    return f"{value / aim:.2f} of the aim{' (missed)' if is_missed else ''}"
