"""From logits to tokens, for a whole batch, each row as if it were alone.

The order of operations, which defines what the parameters mean:

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

from pagemesh.engine.sampler_edits import edited, is_edited
from pagemesh.engine.sampler_scores import candidates, score, scores_of
from pagemesh.engine.uniform import uniforms
from pagemesh.engine.worker.plan import Drawn, Sample
from pagemesh.kernels.ops import DrawLimits, softmax_draw
from pagemesh.wire.work_messages import Sampling

__all__ = ["TEMPERATURE_MIN", "draw", "is_edited", "is_limited", "score"]

Bools = NDArray[np.bool_]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
_BLOCK_ELEMENTS_MAX = 1 << 22
"""Logits worked on at a time, so that the copies of a large batch stay small."""
TEMPERATURE_MIN = np.finfo(np.float32).tiny
"""Smaller temperatures are raised to this one: they may round to 0 in float32, and 0 / 0 is not a
weight. Even at this one only the highest logits have a weight above 0."""


def draw(logits: F32, rows: I64, samples: Sequence[Sample]) -> tuple[Drawn, ...]:
    """One token for each sample.

    ``logits``: float32 [n, vocab], each row contiguous; mask, bias and penalties are applied in
    place and undone. ``rows``: int64 [samples], the logits row of each sample; samples that
    fork share one. A sample whose highest logit is not finite comes back ``poisoned`` and affects
    no other. The ``context`` of a sample must be a view of an array that only ever grows at its
    end, since its tokens are counted only once.
    """
    if any(sample.candidate_count for sample in samples):
        return _draw_beside_searches(logits, rows, samples)
    changed = [is_edited(sample) for sample in samples]
    if any(changed):
        tokens, sound = _draw_edited(logits, rows, samples, np.array(changed))
    else:
        tokens, sound = _draw_rows(logits, rows, samples)
    scores = scores_of(logits, rows, tokens, samples)
    return tuple(
        Drawn(sample.key, token, scores.get(index), poisoned=not whole)
        for index, (sample, token, whole) in enumerate(
            zip(samples, tokens.tolist(), sound.tolist(), strict=True)
        )
    )


def _draw_beside_searches(logits: F32, rows: I64, samples: Sequence[Sample]) -> tuple[Drawn, ...]:
    searching = [bool(sample.candidate_count) for sample in samples]
    found: dict[int, Drawn] = {}
    for mask, where in ((searching, candidates), ([not one for one in searching], draw)):
        places = np.flatnonzero(mask)
        if len(places):
            own = where(logits, rows[places], _those(samples, places))
            found.update(zip(places.tolist(), own, strict=True))
    return tuple(found[place] for place in range(len(samples)))


def _those(samples: Sequence[Sample], places: I64) -> list[Sample]:
    return [samples[place] for place in places.tolist()]


def _blocks(places: I64, vocab: int) -> Iterator[I64]:
    count = max(1, _BLOCK_ELEMENTS_MAX // vocab)
    for start in range(0, len(places), count):
        yield places[start : start + count]


def _draw_edited(
    logits: F32, rows: I64, samples: Sequence[Sample], changed: Bools
) -> tuple[I64, Bools]:
    """Like ``_draw_rows``, from unedited logits; ``changed``: bool [samples], which have edits."""
    if len(set(rows.tolist())) == len(samples):  # rows can be edited in place, and restored
        places = np.flatnonzero(changed)
        with edited(logits, rows[places], _those(samples, places)):
            return _draw_rows(logits, rows, samples)
    tokens = np.empty(len(samples), np.int64)
    sound = np.empty(len(samples), np.bool_)
    plain = np.flatnonzero(~changed)
    if len(plain):
        tokens[plain], sound[plain] = _draw_rows(logits, rows[plain], _those(samples, plain))
    for part in _blocks(np.flatnonzero(changed), logits.shape[1]):
        own, work, at = _those(samples, part), logits[rows[part]], np.arange(len(part))
        with edited(work, at, own):
            tokens[part], sound[part] = _draw_rows(work, at, own)
    return tokens, sound


def _draw_rows(logits: F32, rows: I64, samples: Sequence[Sample]) -> tuple[I64, Bools]:
    """Tokens, int64 [samples], and whether the highest logit is finite, bool [samples]. ``logits``:
    float32 [n, vocab], after mask, bias and penalties, not modified."""
    hot = np.array([sample.sampling.temperature > 0.0 for sample in samples], np.bool_)
    if hot.all():
        return _draw_hot(logits, rows, samples)
    tokens = np.empty(len(samples), np.int64)
    sound = np.empty(len(samples), np.bool_)
    best, places = logits.argmax(axis=-1), rows[~hot]
    tokens[~hot] = best[places]  # the first NaN, if there is one
    sound[~hot] = np.isfinite(logits[places, best[places]])
    if hot.any():
        own = _those(samples, np.flatnonzero(hot))
        tokens[hot], sound[hot] = _draw_hot(logits, rows[hot], own)
    return tokens, sound


def _draw_hot(logits: F32, rows: I64, samples: Sequence[Sample]) -> tuple[I64, Bools]:
    """Like ``_draw_rows``, for samples with a temperature above 0."""
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
    """The limits of all samples; ``None`` when no sample has any."""
    values = [sample.sampling for sample in samples]
    if not any(is_limited(one, vocab) for one in values):
        return None
    return DrawLimits(
        torch.tensor([one.min_p for one in values], dtype=torch.float32),
        torch.tensor([one.top_k for one in values], dtype=torch.int64),
        torch.tensor([one.top_p for one in values], dtype=torch.float64),
    )


def is_limited(values: Sampling, vocab: int) -> bool:
    """Whether min_p, top_k or top_p may exclude some of the ``vocab`` tokens."""
    return values.min_p > 0.0 or 0 < values.top_k < vocab or values.top_p < 1.0


def _uniforms(samples: Sequence[Sample]) -> F64:
    return uniforms(
        np.array([sample.sampling.seed for sample in samples], np.uint64),
        np.array([sample.key.choice for sample in samples], np.uint64),
        np.array([sample.generated_count for sample in samples], np.uint64),
    )
