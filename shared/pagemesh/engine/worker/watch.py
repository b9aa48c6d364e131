"""Whether a step has hung. The thread that computes it cannot be stopped from outside, while the
event loop beside it goes on beating, so that nobody else would see it."""

from __future__ import annotations

LEAST_US = 60_000_000
LONGEST_TIMES = 100
"""Later steps may take so many times the longest before, but at least ``LEAST_US``."""
LOOK_US_MAX = 1_000_000
"""Of the time between two looks no more counts: the whole process may have stood still."""


class StepWatch:
    """Looked through at every tick. ``most_us``: what any step may take, so that its requests
    have time left to go on elsewhere; and what a step may take before one has ended, since
    kernels may have to be compiled."""

    def __init__(self, most_us: int) -> None:
        self._most_us = most_us
        self._begun = 0
        self._spent_us = 0
        self._looked_us = 0

    def is_hung(self, begun: int, *, computing: bool, longest_us: int, now_us: int) -> bool:
        """Whether the step at hand has taken longer than any should. ``begun``: steps that have
        begun so far; ``longest_us``: the longest of those that have ended, 0 for none."""
        if not computing or begun != self._begun:
            self._spent_us = 0
        else:
            self._spent_us += min(now_us - self._looked_us, LOOK_US_MAX)
        self._begun, self._looked_us = begun, now_us
        limit_us = max(LONGEST_TIMES * longest_us, LEAST_US) if longest_us else self._most_us
        return self._spent_us > min(limit_us, self._most_us)
