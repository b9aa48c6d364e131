"""The time limit of tests of made-up examples: it counts what they compute, not what they wait.

How long examples take says how busy the machine is, and a process that was stopped for a while
has done nothing wrong.
"""

from __future__ import annotations

import signal
from types import FrameType

import pytest


class OutOfTime(BaseException):
    """A test took more processor time than it may. No ``Exception`` and not pytest's own failure:
    Hypothesis would take those for what an example found, try it again, and call it flaky."""


def limit_processor_time(item: pytest.Item, limit_s: float) -> None:
    """Have ``OutOfTime`` raised in ``item`` once this process has computed for ``limit_s``.
    pytest-timeout calls what is put into ``item`` when the test has ended."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTime(f"more than {limit_s} s of processor time")

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)

    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    item.cancel_timeout = cancel  # type: ignore[attr-defined]
