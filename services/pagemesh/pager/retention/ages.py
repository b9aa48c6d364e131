"""When ledger numbers were given out, at first to the second, and more coarsely as time goes on.

A page keeps the number under which it was committed, so no time needs to be stored for its age.
"""

from __future__ import annotations

from bisect import bisect_left

_COUNT_MAX = 1_024
_PERIOD_MS = 1_000


class Ages:
    """Samples of the last ledger number over time. When there are too many, every other one is
    dropped and further ones are taken half as often."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._times_ms: list[int] = []
        self._period_ms = _PERIOD_MS

    def note(self, last_number: int, now_ms: int) -> None:
        """Take a sample: ``last_number`` is the last one given out so far. Does nothing if the
        previous sample is too recent."""
        if self._times_ms and now_ms - self._times_ms[-1] < self._period_ms:
            return
        self._numbers.append(last_number)
        self._times_ms.append(now_ms)
        if len(self._numbers) > _COUNT_MAX:
            del self._numbers[1::2], self._times_ms[1::2]
            self._period_ms *= 2

    def age_s(self, number: int, now_ms: int) -> int | None:
        """Seconds since ``number`` was given out; None if that was before the first sample."""
        at = bisect_left(self._numbers, number)
        if not at:
            return None
        given_ms = self._times_ms[at] if at < len(self._times_ms) else now_ms
        return max(0, now_ms - given_ms) // 1_000
