"""The time limit of Hypothesis tests: it counts processor time, and waiting only if that is very
long.

The duration of examples depends on how busy the machine is, and a process may have been stopped for
a while through no fault of its own.
"""

from __future__ import annotations

import signal
from types import FrameType

import pytest

WAIT_TIMES = 10
"""Limit of a test's duration, as a multiple of that of its processor time: a test that waits for
ever hangs."""


class OutOfTime(BaseException):
    """A test exceeded its time limit. Neither an ``Exception`` nor pytest's own failure: Hypothesis
    would take those for a failing example, try it again, and report it as flaky."""


def limit_processor_time(item: pytest.Item, limit_s: float) -> None:
    """Raise ``OutOfTime`` in ``item`` once this process has used ``limit_s`` of processor time, or
    ``WAIT_TIMES`` times that has passed.
    pytest-timeout calls ``item.cancel_timeout``, which is set here, at the end of the test."""

    def ring(number: int, _frame: FrameType | None) -> None:
        computed = number == signal.SIGPROF
        raise OutOfTime(
            f"more than {limit_s} s of processor time" if computed
            else f"more than {WAIT_TIMES * limit_s} s"
        )  # fmt: skip

    limits = (
        (signal.SIGPROF, signal.ITIMER_PROF, limit_s),
        (signal.SIGALRM, signal.ITIMER_REAL, WAIT_TIMES * limit_s),
    )

    def cancel() -> None:
        for number, timer, _ in limits:
            signal.setitimer(timer, 0)
            signal.signal(number, signal.SIG_DFL)

    for number, timer, seconds in limits:
        signal.signal(number, ring)
        signal.setitimer(timer, seconds)
    item.cancel_timeout = cancel  # type: ignore[attr-defined]
