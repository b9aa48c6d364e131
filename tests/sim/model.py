"""A model that is a hash of its context: any wrong page shows as a wrong token.

A slot holds a hash of its token and of the slot before it, *read through the page table*. A token
is drawn from a hash of all slots, read through the page table. The oracle does the same on a plain
list. Workers with other weights have other hashes, and prefix trees of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

VOCAB_TOKENS = 61
STOP_TOKEN = 7
_START = 0x9E3779B9


WEIGHTS = (0, 1)
"""The versions of the model."""


def model_root(weights: int) -> bytes:
    return bytes([ord("m") + weights]) * 32


def tree_root(root: bytes, weights: int) -> bytes:
    """The root under ``weights`` of the tenant whose root under the first weights is ``root``."""
    return root[:1] + bytes([weights]) * 31 if weights else root


def weights_of(root: bytes) -> int:
    """The weights with which pages below ``root`` are computed."""
    return root[1] if root[1] in WEIGHTS else 0


def root_value(root: bytes) -> int:
    return hash((_START, int.from_bytes(root[:8], "little")))


def slot_value(before: int, token: int, weights: int) -> int:
    return hash((before, token, weights) if weights else (before, token))


def context_value(slots: Sequence[int]) -> int:
    return hash(tuple(slots))


def draw(context: int, seed: int, choice: int, position: int) -> int:
    """A token id; the stop token comes up about once in thirty."""
    value = hash((context, seed, choice, position)) & 0xFFFF_FFFF
    return STOP_TOKEN if value % 29 == 0 else value % VOCAB_TOKENS


def score(context: int, token: int) -> bytes:
    """Stands for a log-probability: one float32."""
    return np.float32(hash((context, token)) & 0xFFFF).tobytes()


def logprobs(context: int, masked: Sequence[int]) -> np.ndarray:
    """Stand for the log-probabilities of a beam search: float32 [vocab], all different."""
    values = np.array([hash((context, token, 5)) & 0xFFFF for token in range(VOCAB_TOKENS)])
    scores = (-values / 4096.0 - np.arange(VOCAB_TOKENS) / (1 << 20)).astype("<f4")
    scores[list(masked)] = -np.inf
    return scores


@lru_cache(maxsize=512)
def searched(
    root: bytes, prompt: tuple[int, ...], width: int, keep: int, max_tokens: int, stops: bool
) -> tuple[tuple[int, ...], ...]:
    """What a beam search must deliver, computed on plain lists: length penalty 1, early
    stopping."""
    beams: list[tuple[np.float32, tuple[int, ...]]] = [(np.float32(0.0), ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, max_tokens + 1):
        found = []
        for whole, tokens in beams:
            context = context_value(slots_of(root, (*prompt, *tokens)))
            values = logprobs(context, ())
            found += [(whole + values[one], (*tokens, one)) for one in range(VOCAB_TOKENS)]
        found.sort(key=lambda one: -one[0])
        ends = [(stops and own[-1] == STOP_TOKEN) or length == max_tokens for _, own in found]
        ending = [one for one, last in zip(found[:width], ends, strict=False) if last]
        finished += [(float(whole) / length, own) for whole, own in ending]
        finished = sorted(finished, key=lambda one: -one[0])[:width]
        beams = [one for one, last in zip(found, ends, strict=True) if not last][:width]
        if len(finished) == width:
            break
    return tuple(own for _, own in finished[:keep])


def prompt_score(slot: int, following: int) -> bytes:
    return np.float32(hash((slot, following, 3)) & 0xFFFF).tobytes()


def slots_of(root: bytes, tokens: Sequence[int]) -> list[int]:
    values: list[int] = []
    value, weights = root_value(root), weights_of(root)
    for token in tokens:
        value = slot_value(value, token, weights)
        values.append(value)
    return values


@lru_cache(maxsize=4_096)
def answer(
    root: bytes, prompt: tuple[int, ...], seed: int, choice: int, max_tokens: int, stops: bool
) -> tuple[tuple[int, ...], bytes]:
    """The tokens that must be delivered, and their scores as float32 bytes."""
    slots = slots_of(root, prompt)
    tokens: list[int] = []
    scores = b""
    while len(tokens) < max_tokens:
        context = context_value(slots)
        token = draw(context, seed, choice, len(tokens))
        tokens.append(token)
        scores += score(context, token)
        if stops and token == STOP_TOKEN:
            break
        slots.append(slot_value(slots[-1], token, weights_of(root)))
    return tuple(tokens), scores


def prompt_scores(root: bytes, prompt: tuple[int, ...]) -> bytes:
    """The scores of prompt positions 1 and up, float32 bytes."""
    slots = slots_of(root, prompt)
    return b"".join(
        prompt_score(slot, token) for slot, token in zip(slots, prompt[1:], strict=False)
    )
