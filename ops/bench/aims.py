"""How a figure stands to what is wanted of it, for what benchmarks print."""

from __future__ import annotations


def of_aim(value: float, aim: float, *, at_least: bool = False) -> str:
    """``value`` should be at most ``aim``, or ``at_least`` that."""
    is_missed = value < aim if at_least else value > aim
    return f"{value / aim:.2f} of the aim{' (missed)' if is_missed else ''}"
