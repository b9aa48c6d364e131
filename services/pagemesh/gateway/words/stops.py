"""Stop strings, found across token borders. Pure.

A stop string ends a choice where it is first *completed*, whatever pieces the text comes in;
of several completed by the same character the one that started first counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """Text that can be shown now; ``stop`` is the stop string that was completed after it."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Feed it text; it holds back what may be the start of a stop string.

    ``include``: the stop string itself is part of the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._held = ""

    @property
    def wanted(self) -> bool:
        """Whether there is any stop string."""
        return bool(self._stops)

    @property
    def held(self) -> str:
        return self._held

    def push(self, text: str) -> Released:
        """Costs time in proportion to ``text``, not to what came before."""
        if not self._stops:
            return Released(text)
        buffer = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := buffer.find(stop)) >= 0
        ]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return Released(buffer[: end if self._include else start], stop)
        keep = max(overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return Released(buffer[: len(buffer) - keep])

    def close(self) -> str:
        """The text that was held back: it became no stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
