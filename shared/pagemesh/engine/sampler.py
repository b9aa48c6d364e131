"""From logits to tokens, for a whole batch, each row as if it were alone.

The order of treatment, which is also the meaning of the parameters:

    logits -> scores (log-softmax of the logits as the model gave them)
           -> stop tokens masked while ``min_tokens`` are not reached, ``logit_bias`` added
           -> repetition (prompt and generated), then frequency and presence (generated)
           -> temperature 0: the highest, the lowest id among equals
           -> / temperature -> min_p -> top_k -> top_p -> one uniform through the inverse CDF

Reported log-probabilities are those of the model: untouched by bias, penalties and
temperature, so that they can be compared between requests. The CDF runs over token ids in
ascending order; ties at the edge of top_k and top_p keep the lowest ids.

Every sum is taken along one row in an order that depends on nothing but the row's length, so
a row's token and scores are the same to the last bit in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagemesh.engine.uniform import uniforms
from pagemesh.engine.worker.plan import Drawn, Sample, TokenScores
from pagemesh.wire.work_messages import TOP_LOGPROBS_MAX, Sampling

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
_BLOCK_ELEMENTS_MAX = 1 << 22
"""Logits worked on at a time, so that the copies of a large batch stay small."""


def draw(logits: F32, rows: I64, samples: Sequence[Sample]) -> tuple[Drawn, ...]:
    """One token for each sample.

    ``logits``: float32 [n, vocab], each row contiguous, not modified. ``rows``: int64
    [samples], the logits row of each sample; samples that fork share one.
    """
    tokens = np.empty(len(samples), np.int64)
    plain = np.fromiter((_is_plain_greedy(sample) for sample in samples), np.bool_, len(samples))
    if plain.any():
        tokens[plain] = logits.argmax(axis=-1)[rows[plain]]
    block = max(1, _BLOCK_ELEMENTS_MAX // logits.shape[1])
    rest = np.flatnonzero(~plain)
    for start in range(0, len(rest), block):
        part = rest[start : start + block]
        tokens[part] = _draw_block(logits[rows[part]], [samples[int(index)] for index in part])
    return tuple(
        Drawn(key=sample.key, token=token, scores=_scores_of(logits[row], token, sample.sampling))
        for sample, token, row in zip(samples, tokens.tolist(), rows.tolist(), strict=True)
    )


def score(logits: F32, targets: I64, width: int) -> TokenScores:
    """The log-probabilities of ``targets`` (int64 [n]) under ``logits`` (float32 [n, vocab])
    and of the ``width`` likeliest tokens of each row, likeliest first."""
    count, vocab = logits.shape
    width = min(width, TOP_LOGPROBS_MAX, vocab)
    chosen = np.empty(count, np.float32)
    top_tokens = np.empty((count, width), np.uint32)
    top_values = np.empty((count, width), np.float32)
    block = max(1, _BLOCK_ELEMENTS_MAX // vocab)
    for start in range(0, count, block):
        part = slice(start, start + block)
        normal = _log_normalisers(logits[part])
        picked = np.take_along_axis(logits[part], targets[part, None], axis=-1)[:, 0]
        chosen[part] = picked - normal
        for index in range(start, min(start + block, count)) if width else ():
            best = _best(logits[index], width)
            top_tokens[index] = best
            top_values[index] = logits[index][best] - normal[index - start]
    return TokenScores(
        chosen=chosen.tobytes(),
        width=width,
        top_tokens=top_tokens.tobytes(),
        top_values=top_values.tobytes(),
    )


def _scores_of(row: F32, token: int, sampling: Sampling) -> TokenScores | None:
    if sampling.logprobs is None:
        return None
    return score(row[None], np.array([token]), max(sampling.logprobs, 0))


def _log_normalisers(logits: F32) -> F32:
    """float32 [n]: the logarithm of each row's sum of exponentials."""
    highest = logits.max(axis=-1)
    total = np.exp(logits - highest[:, None]).astype(np.float64).sum(axis=-1)
    return np.asarray(highest + np.log(total), np.float32)


def _best(row: NDArray[np.floating], count: int) -> I64:
    """Ids of the ``count`` highest values, highest first, lowest id first among equals."""
    if count >= len(row):
        return np.argsort(-row, kind="stable")
    edge = np.partition(row, len(row) - count)[len(row) - count]
    candidates = np.flatnonzero(row >= edge)
    return candidates[np.argsort(-row[candidates], kind="stable")][:count]


def _is_plain_greedy(sample: Sample) -> bool:
    return sample.sampling.temperature == 0.0 and not _is_edited(sample)


def _is_edited(sample: Sample) -> bool:
    values = sample.sampling
    return bool(
        values.logit_bias
        or values.presence_penalty
        or values.frequency_penalty
        or values.repetition_penalty != 1.0
        or _generated_count(sample) < values.min_tokens
    )


def _generated_count(sample: Sample) -> int:
    return len(sample.tokens) - sample.prompt_count


def _draw_block(work: F32, samples: Sequence[Sample]) -> I64:
    """int64 [samples]. ``work``: float32 [samples, vocab], overwritten."""
    for row, sample in zip(work, samples, strict=True):
        if _is_edited(sample):
            _edit(row, sample)
    tokens: I64 = work.argmax(axis=-1)
    random = np.flatnonzero([sample.sampling.temperature > 0.0 for sample in samples])
    if len(random):
        hot = [samples[int(index)] for index in random]
        tokens[random] = _draw_random(work[random], hot)
    return tokens


def _edit(row: F32, sample: Sample) -> None:
    """Apply mask, bias and penalties to one row in place."""
    values, vocab = sample.sampling, len(row)
    if _generated_count(sample) < values.min_tokens:
        stops = np.asarray(values.stop_tokens, np.int64)
        row[stops[stops < vocab]] = -np.inf
    for token, bias in values.logit_bias.items():
        if token < vocab:
            row[token] += np.float32(bias)
    if values.repetition_penalty != 1.0:
        seen = np.unique(sample.tokens)
        penalty = np.float32(values.repetition_penalty)
        old = row[seen]
        row[seen] = np.where(old > 0, old / penalty, old * penalty)
    if values.frequency_penalty or values.presence_penalty:
        seen, counts = np.unique(sample.tokens[sample.prompt_count :], return_counts=True)
        row[seen] -= np.float32(values.frequency_penalty) * counts.astype(np.float32)
        row[seen] -= np.float32(values.presence_penalty)


def _draw_random(work: F32, samples: Sequence[Sample]) -> I64:
    """int64 [samples]. ``work``: float32 [samples, vocab], overwritten by weights: each
    token's probability divided by the row's highest."""
    heat = np.array([sample.sampling.temperature for sample in samples], np.float32)
    work -= work.max(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):  # a tiny temperature: far below the maximum is -inf
        work /= heat[:, None]
    weights = np.exp(work, out=work)
    for row, sample in zip(weights, samples, strict=True):
        _truncate(row, sample.sampling)
    sums = weights.cumsum(axis=-1, dtype=np.float64)
    drawn = uniforms(
        np.array([sample.sampling.seed for sample in samples], np.uint64),
        np.array([sample.key.choice for sample in samples], np.uint64),
        np.array([_generated_count(sample) for sample in samples], np.uint64),
    )
    # A uniform just below 1 may round up to the whole sum: then the last token with weight.
    targets = np.minimum(drawn * sums[:, -1], np.nextafter(sums[:, -1], 0.0))
    return np.asarray((sums <= targets[:, None]).sum(axis=-1), np.int64)


def _truncate(weights: F32, values: Sampling) -> None:
    """Zero the weights that min_p, top_k and top_p cut off, in place; the highest is 1."""
    vocab = len(weights)
    if values.min_p > 0.0:
        weights[weights < np.float32(values.min_p)] = 0.0
    limited = 0 < values.top_k < vocab
    if not limited and values.top_p >= 1.0:
        return
    if limited:
        order = _best(weights, values.top_k)
    else:
        # What is left out here weighs at most 1 - top_p in all, so the cut is above it.
        floor = (1.0 - values.top_p) * float(weights.sum(dtype=np.float64)) / vocab
        candidates = np.flatnonzero(weights > floor)
        order = candidates[np.argsort(-weights[candidates], kind="stable")]
    if values.top_p < 1.0:
        mass = weights[order].astype(np.float64)
        whole = float(mass.sum()) if limited else float(weights.sum(dtype=np.float64))
        before = np.cumsum(mass) - mass
        order = order[before < values.top_p * whole]
    kept = weights[order]
    weights[:] = 0.0
    weights[order] = kept
