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

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine.uniform import uniforms
from pagemesh.engine.worker.plan import Drawn, Sample, TokenScores
from pagemesh.kernels.ops import DrawLimits, log_softmax, softmax_draw
from pagemesh.wire.work_messages import TOP_LOGPROBS_MAX, Sampling

Bools = NDArray[np.bool_]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
_BLOCK_ELEMENTS_MAX = 1 << 22
"""Logits worked on at a time, so that the copies of a large batch stay small."""
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
    edited = [is_edited(sample) for sample in samples]
    if any(edited):
        tokens, sound = _draw_edited(logits, rows, samples, np.array(edited))
    else:
        tokens, sound = _draw_rows(logits, rows, samples)
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


def _those(samples: Sequence[Sample], places: I64) -> list[Sample]:
    return [samples[place] for place in places.tolist()]


def _blocks(places: I64, vocab: int) -> Iterator[I64]:
    count = max(1, _BLOCK_ELEMENTS_MAX // vocab)
    for start in range(0, len(places), count):
        yield places[start : start + count]


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


def _draw_edited(
    logits: F32, rows: I64, samples: Sequence[Sample], edited: Bools
) -> tuple[I64, Bools]:
    """As ``_draw_rows``, of the logits as the model gave them; ``edited``: bool [samples]."""
    tokens = np.empty(len(samples), np.int64)
    sound = np.empty(len(samples), np.bool_)
    plain = np.flatnonzero(~edited)
    if len(plain):
        tokens[plain], sound[plain] = _draw_rows(logits, rows[plain], _those(samples, plain))
    for part in _blocks(np.flatnonzero(edited), logits.shape[1]):
        own = _those(samples, part)
        work = logits[rows[part]]
        for row, sample in zip(work, own, strict=True):
            _edit(row, sample)
        tokens[part], sound[part] = _draw_rows(work, np.arange(len(part)), own)
    return tokens, sound


def _draw_rows(logits: F32, rows: I64, samples: Sequence[Sample]) -> tuple[I64, Bools]:
    """int64 [samples], and bool [samples]: is the highest logit a finite number? ``logits``:
    float32 [n, vocab], after mask, bias and penalties, not modified."""
    hot = np.array([sample.sampling.temperature > 0.0 for sample in samples], np.bool_)
    if hot.all():
        return _draw_hot(logits, rows, samples)
    tokens = np.empty(len(samples), np.int64)
    sound = np.empty(len(samples), np.bool_)
    best, places = logits.argmax(axis=-1), rows[~hot]
    tokens[~hot] = best[places]  # the first that is no number, if there is one
    sound[~hot] = np.isfinite(logits[places, best[places]])
    if hot.any():
        own = _those(samples, np.flatnonzero(hot))
        tokens[hot], sound[hot] = _draw_hot(logits, rows[hot], own)
    return tokens, sound


def _draw_hot(logits: F32, rows: I64, samples: Sequence[Sample]) -> tuple[I64, Bools]:
    """As ``_draw_rows``, for samples with a temperature."""
    heat = np.array([sample.sampling.temperature for sample in samples], np.float32)
    tokens, sums = softmax_draw(
        torch.from_numpy(logits),
        torch.from_numpy(rows),
        torch.from_numpy(np.maximum(heat, TEMPERATURE_MIN)),
        torch.from_numpy(_uniforms(samples)),
        _limits(samples, logits.shape[1]),
    )
    return tokens.numpy(), np.isfinite(sums.numpy().sum(axis=1))


def _limits(samples: Sequence[Sample], vocab: int) -> DrawLimits | None:
    """Of all samples, when there is one that is limited."""
    values = [sample.sampling for sample in samples]
    if not any(is_limited(one, vocab) for one in values):
        return None
    return DrawLimits(
        torch.tensor([one.min_p for one in values], dtype=torch.float32),
        torch.tensor([one.top_k for one in values], dtype=torch.int64),
        torch.tensor([one.top_p for one in values], dtype=torch.float64),
    )


def is_limited(values: Sampling, vocab: int) -> bool:
    """Whether not all of ``vocab`` tokens may be drawn."""
    return values.min_p > 0.0 or 0 < values.top_k < vocab or values.top_p < 1.0


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


def _uniforms(samples: Sequence[Sample]) -> F64:
    return uniforms(
        np.array([sample.sampling.seed for sample in samples], np.uint64),
        np.array([sample.key.choice for sample in samples], np.uint64),
        np.array([sample.generated_count for sample in samples], np.uint64),
    )
