"""What is wanted of figures that several benchmarks tell, and how one stands to its aim."""

from __future__ import annotations

from collections.abc import Mapping

OF_FLOOR: Mapping[str, float] = {
    "batch 1": 0.85,
    "batch 8": 0.75,
    "batch 32": 0.60,
    "prefill 512": 0.75,
}
"""Of the floor of a step, at least, by the cases of ``bench_step``."""
OF_STREAM = 0.75
"""Of a stream over the same pool, at least, for attention to float32 K and V."""
OVER_FLOAT32: Mapping[str, float] = {"float16": 1.6, "int8": 2.0}
"""Times as fast as with float32 K and V, at least."""
DETERMINISTIC_SLOWDOWN = 1.10
"""Times as long as without ``--deterministic``, at most."""
OUTSIDE_STEPS: Mapping[str, float] = {"S": 0.15, "M": 0.05}
"""Of the time of a decode step that is Python's and the bus's, at most, by model."""
OVER_IN_PROCESS = 1.10
"""The first token of a cache hit over that of the worker loop in process, at most, for models so
slow that this is more than the milliseconds wanted of others."""
SPEED_OF_MODEL: Mapping[str, float] = {"L": 1.2}
"""Times the tokens a second of the best peer, at least, whatever the workload. Of other models it
is the workload that says (``serving.workloads``)."""


def is_slow(in_process_ms: float, over_ms: float) -> bool:
    """Whether ``OVER_IN_PROCESS`` allows more than ``over_ms`` do."""
    return in_process_ms * (OVER_IN_PROCESS - 1) > over_ms


def of_aim(value: float, aim: float, *, at_least: bool = False) -> str:
    """``value`` should be at most ``aim``, or ``at_least`` that."""
    is_missed = value < aim if at_least else value > aim
    return f"{value / aim:.2f} of the aim{' (missed)' if is_missed else ''}"
