"""The slots that sequences hold without using them while they live, weighted by time.

A sequence is followed as a worker processes it; unused slots are counted as in
``ops/bench/bench_waste.py``:

    tail      after the last token, in its page
    growth    in pages ahead of need
    prompt    granted for a prompt and not computed yet, including the current chunk

          admitted           computed, chunk by chunk         drawn, token by token     ends
             |----- prompt, and growth at its end ------|-------- tail and growth --------|

How many pages are asked for, and when, is decided by the code of workers and pager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pagemesh.cli.planning.walk import Walk
from pagemesh.engine.worker import ahead
from pagemesh.pager.leases.promises import first_part
from pagemesh.wire.presence import PageNeeds


@dataclass(frozen=True, slots=True)
class Pace:
    """How a sequence advances. Its last ``answer_tokens`` are decoded, but at least one token is
    prompt. Speeds are those of one sequence, in tokens a second."""

    answer_tokens: int
    prompt_tokens_s: int
    answer_tokens_s: int
    chunk_tokens: int
    prompt_chunks: int
    growth_pages: int

    def prompt_tokens(self, tokens: int) -> int:
        """The prompt's share of a sequence that ends with ``tokens``."""
        return max(1, tokens - self.answer_tokens)


@dataclass(frozen=True, slots=True)
class WasteOverTime:
    """Unused slots as shares of the slots held, integrated over time."""

    tail: float
    growth: float
    prompt: float

    @property
    def total(self) -> float:
        return self.tail + self.growth + self.prompt


@dataclass(slots=True)
class _Areas:
    """Slots times seconds."""

    tail: float = 0.0
    growth: float = 0.0
    prompt: float = 0.0
    held: float = 0.0


def waste_over_time(
    lengths: Sequence[int], page_size: int, pace: Pace, shared_tokens: int = 0
) -> WasteOverTime:
    """The waste of sequences that end with ``lengths`` tokens, each equally often. The whole pages
    of the first ``shared_tokens`` are cached: they are not computed, and not counted, since all
    sequences hold the same ones."""
    areas = _Areas()
    for tokens, count in Counter(lengths).items():
        prompt_tokens = pace.prompt_tokens(tokens)
        cached = min(shared_tokens, prompt_tokens - 1) // page_size * page_size
        own = _Areas()
        slots = _compute(own, prompt_tokens, tokens, cached, page_size, pace)
        _draw(own, prompt_tokens, tokens, cached, slots, page_size, pace)
        areas.tail += count * own.tail
        areas.growth += count * own.growth
        areas.prompt += count * own.prompt
        areas.held += count * own.held
    return WasteOverTime(
        areas.tail / areas.held, areas.growth / areas.held, areas.prompt / areas.held
    )


def _compute(
    areas: _Areas, prompt_tokens: int, tokens: int, cached: int, page_size: int, pace: Pace
) -> int:
    """Add the prompt's areas, from its admission on. Returns the slots held at its end."""
    chunk, chunks = pace.chunk_tokens, pace.prompt_chunks
    whole = _needs(page_size, pace).reserve_tokens(prompt_tokens, tokens)
    missing = (_whole(whole, page_size) - cached) // page_size
    first = _whole(ahead.first_part(chunk, chunks), page_size) // page_size

    def step(filled: int, slots: int) -> tuple[int, int]:
        end = min(filled + chunk, prompt_tokens)
        low, wanted = ahead.next_part(end, prompt_tokens, whole, chunk_tokens=chunk, chunks=chunks)
        return (_whole(wanted, page_size) if slots < low else slots), end

    walk = Walk(step, page_size, enough_slots=_whole(prompt_tokens, page_size))
    # Before the last chunks, the end of the prompt decides nothing.
    steady = prompt_tokens - (2 * chunks + 2) * chunk
    granted = cached + first_part(missing, first) * page_size
    slots = walk.go(cached, prompt_tokens, granted, steady_until=steady)
    count, rest = divmod(prompt_tokens - cached, chunk)
    computed = count * (2 * cached + (count - 1) * chunk) // 2 * chunk
    computed += rest * (prompt_tokens - rest)
    areas.growth += walk.beyond / pace.prompt_tokens_s
    areas.prompt += (walk.held - walk.beyond - computed) / pace.prompt_tokens_s
    areas.held += (walk.held - (prompt_tokens - cached) * cached) / pace.prompt_tokens_s
    return slots


def _draw(
    areas: _Areas, prompt_tokens: int, tokens: int, cached: int, slots: int,
    page_size: int, pace: Pace,
) -> None:  # fmt: skip
    """Add the answer's areas: each length, from the prompt's to the last, lasts for the time of one
    token."""
    needs, seconds = _needs(page_size, pace), 1 / pace.answer_tokens_s

    def step(filled: int, slots: int) -> tuple[int, int]:
        if slots < min(filled + 1 + page_size, tokens):
            slots = _whole(needs.reserve_tokens(filled + 1, tokens), page_size)
        # With less than a page ahead, a worker asks for more, unless these slots are enough.
        return slots, tokens + 1 if slots >= tokens else max(slots - page_size, filled + 1)

    walk = Walk(step, page_size, enough_slots=tokens)
    steady = tokens - needs.growth_tokens - 2 * page_size
    walk.go(prompt_tokens, tokens + 1, slots, steady_until=steady)
    steps = tokens + 1 - prompt_tokens
    tail = _tails(tokens + 1, page_size) - _tails(prompt_tokens, page_size)
    used = steps * (prompt_tokens + tokens) // 2
    areas.tail += seconds * tail
    areas.growth += seconds * (walk.held - used - tail)
    areas.held += seconds * (walk.held - steps * cached)


def _needs(page_size: int, pace: Pace) -> PageNeeds:
    return PageNeeds(
        growth_tokens=pace.growth_pages * page_size,
        first_tokens=ahead.first_part(pace.chunk_tokens, pace.prompt_chunks),
    )


def _whole(tokens: int, page_size: int) -> int:
    """Slots of the whole pages that hold ``tokens``."""
    return -(-tokens // page_size) * page_size


def _tails(count: int, page_size: int) -> int:
    """The sum of the tails of the lengths 0 to ``count`` - 1."""
    pages, rest = divmod(count, page_size)
    return (
        pages * page_size * (page_size - 1) // 2
        + max(0, rest - 1) * page_size
        - (rest * (rest - 1) // 2)
    )
