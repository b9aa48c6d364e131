"""Which sequences a step computes, and how many tokens of each: a pure choice.

Sequences that draw tokens go first, so that nobody who reads an answer waits for somebody
else's prompt; then prompts share what is left of the step's tokens, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pagemesh.engine.worker.sequence import Phase, Sequence


@dataclass(frozen=True, slots=True)
class Wish:
    """``count`` tokens of ``sequence`` could be computed now: they are known, and have slots."""

    sequence: Sequence
    count: int


class Batching(Protocol):
    def choose(self, wishes: Iterable[Wish]) -> list[Wish]:
        """Part of ``wishes`` (in order of precedence), each with at least one token and at
        most as many as wished."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """The same number of tokens for every step."""

    step_tokens_max: int
    chunk_tokens_max: int
    rows_max: int

    def choose(self, wishes: Iterable[Wish]) -> list[Wish]:
        drawing: list[Wish] = []
        prompts: list[Wish] = []
        for wish in wishes:
            decodes = wish.sequence.phase is Phase.DECODE and wish.count == 1
            (drawing if decodes else prompts).append(wish)
        chosen = drawing[: min(self.rows_max, self.step_tokens_max)]
        budget = self.step_tokens_max - len(chosen)
        for wish in prompts:
            if budget == 0 or len(chosen) == self.rows_max:
                break
            count = min(wish.count, self.chunk_tokens_max, budget)
            chosen.append(Wish(wish.sequence, count))
            budget -= count
        return chosen
