"""A sequence followed step by step, with cycles of steps taken at once.

Before the last steps, what a step does depends only on the place in the page and on the slots that
are ahead. When both come again, so will all that was between:

    filled           0    3    6    9    12   15  ...       pages of 2 slots,
    slots            8    8    14   14   20   20  ...       chunks of 3 tokens
    place, ahead     0,8  1,5  0,8: from here on, every 6 tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Step = Callable[[int, int], tuple[int, int]]
"""Takes filled tokens and slots. Returns the slots held during the step, and the tokens filled at
its end."""


@dataclass(slots=True)
class Walk:
    """``held`` counts slots times tokens, and ``beyond`` those of slots beyond ``enough_slots``:
    who has so many asks for no more."""

    step: Step
    page_size: int
    enough_slots: int
    held: int = 0
    beyond: int = 0

    def go(self, filled: int, stop: int, slots: int, *, steady_until: int) -> int:
        """Walk from ``filled`` tokens to ``stop`` or beyond. Steps that begin before
        ``steady_until`` take no notice of the end. Returns the slots held at the end."""
        seen: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        while filled < stop:
            if filled < steady_until:
                now = filled, slots, self.held, self.beyond
                ahead = -1 if slots >= self.enough_slots else slots - filled
                before = seen.setdefault((filled % self.page_size, ahead), now)
                if before is not now:
                    filled, slots = self._skip(before, now, steady_until)
                    steady_until = filled
            slots, end = self.step(filled, slots)
            self.held += (end - filled) * slots
            self.beyond += (end - filled) * max(slots - self.enough_slots, 0)
            filled = end
        return slots

    def _skip(
        self, before: tuple[int, int, int, int], now: tuple[int, int, int, int], until: int
    ) -> tuple[int, int]:
        """Repeat what was between ``before`` and ``now``, as often as it begins and ends before
        ``until``. Returns the tokens filled then, and the slots."""
        tokens, slots, held, beyond = (new - old for old, new in zip(before, now, strict=True))
        count = (until - now[0]) // tokens
        # Each time all slots are ``slots`` more; beyond what is enough there are none, or the same.
        self.held += count * held + slots * tokens * (count * (count + 1) // 2)
        self.beyond += count * beyond
        return now[0] + count * tokens, now[1] + count * slots
