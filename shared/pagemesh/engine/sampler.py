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

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine.uniform import uniforms
from pagemesh.engine.worker.plan import Drawn, Sample, TokenScores
from pagemesh.kernels.ops import log_softmax
from pagemesh.wire.work_messages import TOP_LOGPROBS_MAX, Sampling

Bools = NDArray[np.bool_]
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
_BLOCK_ELEMENTS_MAX = 1 << 22
"""Logits worked on at a time, so that the copies of a large batch stay small."""
_SUM_BLOCK = 1024
TEMPERATURE_MIN = np.finfo(np.float32).tiny
"""A temperature may be smaller than any float32, and 0 / 0 is no weight. Only the highest
logits are left at this one already."""


def draw(logits: F32, rows: I64, samples: Sequence[Sample]) -> tuple[Drawn, ...]:
    """One token for each sample.

    ``logits``: float32 [n, vocab], each row contiguous, not modified. ``rows``: int64
    [samples], the logits row of each sample; samples that fork share one. A sample whose
    highest logit is no finite number comes back ``poisoned``; it changes no other.
    """
    if any(sample.candidate_count for sample in samples):
        return _draw_beside_searches(logits, rows, samples)
    tokens = np.empty(len(samples), np.int64)
    sound = np.empty(len(samples), np.bool_)
    greedy = [_is_plain_greedy(sample) for sample in samples]
    plain = np.array(greedy, np.bool_)
    if any(greedy):
        best, places = logits.argmax(axis=-1), rows[plain]
        tokens[plain] = best[places]
        sound[plain] = np.isfinite(logits[places, best[places]])
    block = max(1, _BLOCK_ELEMENTS_MAX // logits.shape[1])
    rest = np.flatnonzero(~plain)
    for start in range(0, len(rest), block):
        part = rest[start : start + block]
        own = [samples[int(index)] for index in part]
        tokens[part], sound[part] = _draw_block(logits[rows[part]], own)
    scores = _scores_of(logits, rows, tokens, samples)
    return tuple(
        Drawn(sample.key, token, scores.get(index), poisoned=not whole)
        for index, (sample, token, whole) in enumerate(
            zip(samples, tokens.tolist(), sound.tolist(), strict=True)
        )
    )


def _draw_beside_searches(logits: F32, rows: I64, samples: Sequence[Sample]) -> tuple[Drawn, ...]:
    drawing = [i for i, sample in enumerate(samples) if not sample.candidate_count]
    drawn = iter(draw(logits, rows[drawing], [samples[i] for i in drawing]) if drawing else ())
    return tuple(
        _candidates(logits[row], sample) if sample.candidate_count else next(drawn)
        for row, sample in zip(rows.tolist(), samples, strict=True)
    )


def _candidates(logits: F32, sample: Sample) -> Drawn:
    """What a search of ``sample`` may go on with; ``logits``: float32 [vocab]."""
    values = sample.sampling
    scores: F32 = log_softmax(torch.from_numpy(logits[None])).numpy()[0]
    reported = _likeliest(logits, scores, values.logprobs) if values.logprobs else None
    allowed = logits
    if sample.generated_count < values.min_tokens:
        stops = np.asarray(values.stop_tokens, np.int64)
        stops = stops[stops < len(logits)]
        allowed, scores = logits.copy(), scores.copy()
        allowed[stops] = scores[stops] = -np.inf
    top = int(allowed.argmax())
    if not np.isfinite(scores[top]):  # no number among the logits, or nothing that may come
        return Drawn(sample.key, top, poisoned=True)
    candidates = _likeliest(allowed, scores, sample.candidate_count)
    return Drawn(sample.key, top, reported, candidates=candidates)


def _scores_of(
    logits: F32, rows: I64, tokens: I64, samples: Sequence[Sample]
) -> dict[int, TokenScores]:
    """What the samples that want log-probabilities report, by index."""
    wanting = [i for i, sample in enumerate(samples) if sample.sampling.logprobs is not None]
    found: dict[int, TokenScores] = {}
    block = max(1, _BLOCK_ELEMENTS_MAX // logits.shape[1])
    for start in range(0, len(wanting), block):
        part = wanting[start : start + block]
        own = logits[rows[part]]
        scores = log_softmax(torch.from_numpy(own)).numpy()
        for place, index in enumerate(part):
            width = max(samples[index].sampling.logprobs or 0, 0)
            chosen = scores[place, tokens[index]].tobytes()
            found[index] = _likeliest(own[place], scores[place], width, chosen)
    return found


def _likeliest(logits: F32, scores: F32, count: int, chosen: bytes = b"") -> TokenScores:
    """Of one row: the ``count`` highest ``logits`` and their ``scores``, beside the ``chosen``."""
    best = _best(logits, min(count, len(logits)))
    return TokenScores(
        chosen=chosen,
        width=len(best),
        top_tokens=best.astype(np.uint32).tobytes(),
        top_values=scores[best].tobytes(),
    )


def score(logits: F32, targets: I64, width: int) -> TokenScores:
    """The log-probabilities of ``targets`` (int64 [n]) under ``logits`` (float32 [n, vocab])
    and of the ``width`` likeliest tokens of each row, likeliest first; NaN for a row whose
    highest logit is no finite number."""
    count, vocab = logits.shape
    width = min(width, TOP_LOGPROBS_MAX, vocab)
    chosen = np.empty(count, np.float32)
    top_tokens = np.empty((count, width), np.uint32)
    top_values = np.empty((count, width), np.float32)
    block = max(1, _BLOCK_ELEMENTS_MAX // vocab)
    for start in range(0, count, block):
        part = slice(start, start + block)
        scores = log_softmax(torch.from_numpy(logits[part])).numpy()
        sound = np.isfinite(logits[part].max(axis=-1))
        chosen[part] = np.where(sound, scores[np.arange(len(scores)), targets[part]], np.nan)
        for index in range(len(scores)) if width else ():
            best = _best(logits[start + index], width)
            top_tokens[start + index] = best
            top_values[start + index] = scores[index][best]
    return TokenScores(
        chosen=chosen.tobytes(),
        width=width,
        top_tokens=top_tokens.tobytes(),
        top_values=top_values.tobytes(),
    )


def _best(row: NDArray[np.floating], count: int) -> I64:
    """Ids of the ``count`` highest values, highest first, lowest id first among equals. Of
    logits, not log-probabilities: different ones may round to the same."""
    if count == 0:
        return np.empty(0, np.int64)
    if count >= len(row):
        return np.argsort(-row, kind="stable")
    edge = np.partition(row, len(row) - count)[len(row) - count]
    candidates = np.flatnonzero(row >= edge)
    if len(candidates) < count:  # of what is no number none is the highest
        return np.arange(count)
    return candidates[np.argsort(-row[candidates], kind="stable")][:count]


def _is_plain_greedy(sample: Sample) -> bool:
    return sample.sampling.temperature == 0.0 and not is_edited(sample)


def is_edited(sample: Sample) -> bool:
    """Whether a mask, bias or penalty changes its logits."""
    values = sample.sampling
    return bool(
        values.logit_bias
        or values.presence_penalty
        or values.frequency_penalty
        or values.repetition_penalty != 1.0
        or sample.generated_count < values.min_tokens
    )


def _draw_block(work: F32, samples: Sequence[Sample]) -> tuple[I64, Bools]:
    """int64 [samples], and bool [samples]: is the highest logit a finite number? ``work``:
    float32 [samples, vocab], overwritten."""
    for row, sample in zip(work, samples, strict=True):
        if is_edited(sample):
            _edit(row, sample)
    tokens: I64 = work.argmax(axis=-1)  # the first that is no number, if there is one
    sound: Bools = np.isfinite(work[np.arange(len(samples)), tokens])
    hot = np.fromiter((sample.sampling.temperature > 0.0 for sample in samples), np.bool_)
    random = np.flatnonzero(hot & sound)
    if len(random):
        own = [samples[int(index)] for index in random]
        tokens[random] = _draw_random(work[random], own)
    return tokens, sound


def _edit(row: F32, sample: Sample) -> None:
    """Apply mask, bias and penalties to one row in place."""
    values, vocab = sample.sampling, len(row)
    if sample.generated_count < values.min_tokens:
        stops = np.asarray(values.stop_tokens, np.int64)
        row[stops[stops < vocab]] = -np.inf
    if values.logit_bias:
        ids = np.fromiter(values.logit_bias, np.int64, len(values.logit_bias))
        biases = np.fromiter(values.logit_bias.values(), np.float32, len(ids))
        row[ids[ids < vocab]] += biases[ids < vocab]
    # A token that occurs twice is written twice, with the same value.
    if values.repetition_penalty != 1.0:
        seen = sample.tokens.astype(np.int64)
        penalty = np.float32(values.repetition_penalty)
        old = row[seen]
        row[seen] = np.where(old > 0, old / penalty, old * penalty)
    if values.frequency_penalty or values.presence_penalty:
        seen = sample.tokens[sample.prompt_count :].astype(np.int64)
        counts = np.bincount(seen)[seen].astype(np.float32)
        lowered = row[seen] - np.float32(values.frequency_penalty) * counts
        row[seen] = lowered - np.float32(values.presence_penalty)


def _draw_random(work: F32, samples: Sequence[Sample]) -> I64:
    """int64 [samples]. ``work``: float32 [samples, vocab], overwritten by weights: each
    token's probability divided by the row's highest."""
    heat = np.array([sample.sampling.temperature for sample in samples], np.float32)
    np.maximum(heat, TEMPERATURE_MIN, out=heat)
    work -= work.max(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):  # a tiny temperature: far below the maximum is -inf
        work /= heat[:, None]
    weights = np.exp(work, out=work)
    drawn = uniforms(
        np.array([sample.sampling.seed for sample in samples], np.uint64),
        np.array([sample.key.choice for sample in samples], np.uint64),
        np.array([sample.generated_count for sample in samples], np.uint64),
    )
    tokens = np.empty(len(samples), np.int64)
    for index, (row, sample) in enumerate(zip(weights, samples, strict=True)):
        kept = _kept(row, sample.sampling)
        if kept is None:
            tokens[index] = _invert(row, float(drawn[index]))
        else:
            tokens[index] = kept[_invert(row[kept], float(drawn[index]))]
    return tokens


def _kept(weights: F32, values: Sampling) -> I64 | None:
    """Ids, ascending, that min_p, top_k and top_p leave; None: all. The highest weight is 1."""
    vocab, limited = len(weights), 0 < values.top_k < len(weights)
    if values.min_p <= 0.0 and not limited and values.top_p >= 1.0:
        return None
    kept, own = None, weights
    if values.min_p > 0.0 or limited:
        kept = np.flatnonzero(weights >= np.float32(values.min_p))
        if 0 < values.top_k < len(kept):
            kept = _highest(weights, kept, values.top_k)
        if values.top_p >= 1.0:
            return kept
        own = weights[kept]
    whole = float(own.sum(dtype=np.float64))
    # What is left out here weighs at most (1 - top_p) of it all, so the cut is above it.
    heavy = np.flatnonzero(own > (1.0 - values.top_p) * whole / vocab)
    heavy = heavy if kept is None else kept[heavy]
    falling = np.sort(weights[heavy])[::-1].astype(np.float64)
    before = np.cumsum(falling) - falling
    return _highest(weights, heavy, int(np.count_nonzero(before < values.top_p * whole)))


def _highest(weights: F32, among: I64, count: int) -> I64:
    """The ``count`` ids of ``among`` (ascending) with the highest weights, ascending; the
    lowest ids among equals."""
    if count >= len(among):
        return among
    own = weights[among]
    edge = np.partition(own, len(own) - count)[len(own) - count]
    above = own > edge
    level = np.flatnonzero(own == edge)[: count - int(np.count_nonzero(above))]
    above[level] = True
    return np.asarray(among[above])


def _invert(weights: F32, uniform: float) -> int:
    """The first index whose running sum of weights exceeds that share of the whole sum.

    Sums of blocks find the block, a running sum within it finds the index.
    """
    starts = np.arange(0, len(weights), _SUM_BLOCK)
    edges = np.add.reduceat(weights, starts, dtype=np.float64).cumsum()
    whole = float(edges[-1])
    # A uniform just below 1 may round up to the whole sum.
    target = min(uniform * whole, math.nextafter(whole, 0.0))
    block = int(edges.searchsorted(target, side="right"))
    below = float(edges[block - 1]) if block else 0.0
    part = weights[block * _SUM_BLOCK : (block + 1) * _SUM_BLOCK]
    running = below + part.cumsum(dtype=np.float64)
    index = int(running.searchsorted(target, side="right"))
    if index == len(part):  # the two ways to sum rounded differently
        index = int(np.flatnonzero(part)[-1])
    return block * _SUM_BLOCK + index
