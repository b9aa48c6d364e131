"""Detects a hung step. The step thread cannot be stopped from outside, and the event loop keeps
giving signs of life meanwhile, so that nobody else would notice."""

from __future__ import annotations

LEAST_US = 60_000_000
LONGEST_TIMES = 100
"""A step may take this many times as long as the longest before it, and at least ``LEAST_US``."""
LOOK_US_MAX = 1_000_000
"""At most this much of the time between two checks counts: the process may have been stopped."""


class StepWatch:
    """Checked at every tick. ``most_us``: the longest that any step may take, so that its requests
    have time left to go on elsewhere. Until a first step has ended it is the only limit, since
    kernels may have to be compiled."""

    def __init__(self, most_us: int) -> None:
        self._most_us = most_us
        self._begun = 0
        self._spent_us = 0
        self._looked_us = 0

    def is_hung(self, begun: int, *, computing: bool, longest_us: int, now_us: int) -> bool:
        """Whether the running step has taken longer than any should. ``begun``: how many steps
        have begun so far; ``longest_us``: the longest of those that have ended, 0 if none has."""
        if not computing or begun != self._begun:
            self._spent_us = 0
        else:
            self._spent_us += min(now_us - self._looked_us, LOOK_US_MAX)
        self._begun, self._looked_us = begun, now_us
        limit_us = max(LONGEST_TIMES * longest_us, LEAST_US) if longest_us else self._most_us
        return self._spent_us > min(limit_us, self._most_us)
