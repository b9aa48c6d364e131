"""Random prompts, which no cache has seen except for the prefix they share. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from string import ascii_lowercase

SAMPLE = " ".join(map("".join, product(ascii_lowercase, repeat=2)))
"""Text that the server tokenises to get valid token ids of its model, whichever that is."""


def prompts(
    tokens: Sequence[int], count: int, input_tokens: int, shared_tokens: int, draw: Random
) -> Iterator[list[int]]:
    """``count`` prompts of ``input_tokens`` ids drawn from ``tokens``; the first ``shared_tokens``
    are the same in all. Generated lazily, since together they may be large."""
    shared = draw.choices(tokens, k=shared_tokens)
    own_tokens = input_tokens - shared_tokens
    for _ in range(count):
        yield shared + draw.choices(tokens, k=own_tokens)


def moments(rate: float, draw: Random) -> Iterator[float]:
    """Times at which to send requests, in seconds: a Poisson process of ``rate`` a second."""
    at_s = 0.0
    while True:
        yield at_s
        at_s += draw.expovariate(rate)
