"""Edits and log-probabilities row by row in numpy: the reference that the sampler must match to the
last bit, and the baseline of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine.sampler import draw
from pagemesh.engine.worker.plan import Drawn, Sample, TokenScores
from pagemesh.kernels.ops import log_softmax

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


def plain_draw(logits: F32, rows: I64, samples: Sequence[Sample]) -> tuple[Drawn, ...]:
    """Like ``sampler.draw`` for samples that draw a token, but edits and scores are computed
    here."""
    work = logits[rows]
    for row, sample in zip(work, samples, strict=True):
        edit(row, sample)
    drawn = draw(work, np.arange(len(samples)), [_without_edits(one) for one in samples])
    if all(sample.sampling.logprobs is None for sample in samples):
        return drawn
    own = logits[rows]
    scores = log_softmax(torch.from_numpy(own)).numpy()
    return tuple(
        Drawn(
            one.key,
            one.token,
            reported(own[i], scores[i], one.token, sample.sampling.logprobs),
            poisoned=one.poisoned,
        )
        for i, (one, sample) in enumerate(zip(drawn, samples, strict=True))
    )


def edit(row: F32, sample: Sample) -> None:
    """Mask, bias and penalties of one row, in place."""
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


def reported(logits: F32, scores: F32, token: int, width: int | None) -> TokenScores | None:
    """The scores of one row: that of ``token``, and those of the highest ``logits``."""
    if width is None:
        return None
    best = best_of(logits, min(max(width, 0), len(logits)))
    return TokenScores(
        chosen=scores[token].tobytes(),
        width=len(best),
        top_tokens=best.astype(np.uint32).tobytes(),
        top_values=scores[best].tobytes(),
    )


def best_of(row: F32, count: int) -> I64:
    """Ids of the ``count`` highest values, highest first, and lowest id first among equals."""
    if count == 0:
        return np.empty(0, np.int64)
    if count >= len(row):
        return np.argsort(-row, kind="stable")
    edge = np.partition(row, len(row) - count)[len(row) - count]
    places = np.flatnonzero(row >= edge)
    return places[np.argsort(-row[places], kind="stable")][:count]


def _without_edits(sample: Sample) -> Sample:
    """``sample`` without edits, for logits that have been edited already."""
    values = msgspec.structs.replace(
        sample.sampling, logit_bias={}, presence_penalty=0.0, frequency_penalty=0.0,
        repetition_penalty=1.0, min_tokens=0, logprobs=None,
    )  # fmt: skip
    return Sample(sample.key, values, sample.context, sample.prompt_count, sample.drawn)
