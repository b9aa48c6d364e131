"""The time limit of tests of made-up examples: it counts what they compute, and what they wait only
when that is very long.

How long examples take says how busy the machine is, and a process that was stopped for a while
has done nothing wrong.
"""

from __future__ import annotations

import signal
from types import FrameType

import pytest

WAIT_TIMES = 10
"""How many times as long as it may compute a test may take: one that waits for ever has hung."""


class OutOfTime(BaseException):
    """A test took more time than it may. No ``Exception`` and not pytest's own failure:
    Hypothesis would take those for what an example found, try it again, and call it flaky."""


def limit_processor_time(item: pytest.Item, limit_s: float) -> None:
    """Have ``OutOfTime`` raised in ``item`` once this process has computed for ``limit_s``, or
    ``WAIT_TIMES`` as long have passed.
    pytest-timeout calls what is put into ``item`` when the test has ended."""

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
