"""Prompts that no cache has seen but for what they are to have in common. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from string import ascii_lowercase

SAMPLE = " ".join(map("".join, product(ascii_lowercase, repeat=2)))
"""Tokenised by the server, it gives ids to make prompts of: those of any model do."""


def prompts(
    tokens: Sequence[int], count: int, input_tokens: int, shared_tokens: int, draw: Random
) -> Iterator[list[int]]:
    """``count`` prompts of ``input_tokens`` ids out of ``tokens``, the first ``shared_tokens`` of
    which are the same in all, made as they are taken: many are long together."""
    shared = draw.choices(tokens, k=shared_tokens)
    own_tokens = input_tokens - shared_tokens
    for _ in range(count):
        yield shared + draw.choices(tokens, k=own_tokens)


def moments(rate: float, draw: Random) -> Iterator[float]:
    """When requests are sent, in seconds: ``rate`` a second, each regardless of the others (a
    Poisson process)."""
    at_s = 0.0
    while True:
        yield at_s
        at_s += draw.expovariate(rate)
