"""Log-probabilities of tokens that were drawn or given, and of the likeliest alternatives.

All rows are scored at once, without copying them. Scores are the model's own, from unedited logits;
the likeliest tokens are those with the highest logits, the lowest ids first among equals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine.worker.plan import Drawn, Sample, TokenScores
from pagemesh.kernels.ops import top_scores
from pagemesh.wire.work_messages import TOP_LOGPROBS_MAX

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


def scores_of(
    logits: F32, rows: I64, tokens: I64, samples: Sequence[Sample]
) -> dict[int, TokenScores]:
    """The scores of the samples that ask for log-probabilities, by index. ``logits``: float32
    [n, vocab]; ``rows`` and ``tokens``: int64 [samples], the row and the token of each."""
    wanting = [i for i, sample in enumerate(samples) if sample.sampling.logprobs is not None]
    if not wanting:
        return {}
    widths = [max(samples[i].sampling.logprobs or 0, 0) for i in wanting]
    chosen, best, values = _top(logits, rows[wanting], tokens[wanting, None], widths)
    return {
        index: _reported(best[place], values[place], width, chosen[place].tobytes())
        for place, (index, width) in enumerate(zip(wanting, widths, strict=True))
    }


def score(logits: F32, targets: I64, width: int) -> TokenScores:
    """The log-probabilities of ``targets`` (int64 [n]) under ``logits`` (float32 [n, vocab])
    and of the ``width`` likeliest tokens of each row, likeliest first; NaN for a row whose
    highest logit is not finite."""
    count, vocab = logits.shape
    width = min(width, TOP_LOGPROBS_MAX, vocab)
    chosen, best, values = _top(logits, np.arange(count), targets[:, None], [width] * count)
    return TokenScores(
        chosen=chosen.tobytes(),
        width=width,
        top_tokens=best.astype(np.uint32).tobytes(),
        top_values=values.tobytes(),
    )


def candidates(logits: F32, rows: I64, samples: Sequence[Sample]) -> list[Drawn]:
    """The tokens with which the beam searches of ``samples`` may continue, each from its row (int64
    [samples]) of ``logits``. Tokens that are not allowed yet have minus infinity, so come last."""
    widths = [max(sample.sampling.logprobs or 0, 0) for sample in samples]
    counts = [sample.candidate_count for sample in samples]
    _, best, values = _top(logits, rows, None, np.maximum(widths, counts).tolist())
    reported = [
        _reported(best[i], values[i], width) if width else None for i, width in enumerate(widths)
    ]
    for index, sample in enumerate(samples):
        if sample.generated_count < sample.sampling.min_tokens:
            own = slice(index, index + 1)
            best[own], values[own] = _allowed(logits, rows[own], sample, best.shape[1])
    # The highest logit is not finite, or no token is allowed.
    poisoned = ~np.isfinite(values[:, 0])
    return [
        Drawn(sample.key, int(best[i, 0]), poisoned=True)
        if poisoned[i]
        else Drawn(
            sample.key, int(best[i, 0]), reported[i],
            candidates=_reported(best[i], values[i], sample.candidate_count),
        )
        for i, sample in enumerate(samples)
    ]  # fmt: skip


def _allowed(logits: F32, row: I64, sample: Sample, width: int) -> tuple[I64, F32]:
    """Ids of the likeliest tokens that are not stop tokens, [1, width], and their log-probabilities
    [1, width], normalised over all tokens including stop tokens."""
    work = logits[row]
    stops = np.array(sample.sampling.stop_tokens, np.int64)
    work[0, stops[stops < work.shape[1]]] = -np.inf
    _, best, _ = _top(work, np.zeros(1, np.int64), None, [width])
    values, _, _ = _top(logits, row, best, [0])
    values[np.isin(best, stops)] = -np.inf
    return best, values


def _top(
    logits: F32, rows: I64, columns: I64 | None, counts: Sequence[int]
) -> tuple[F32, I64, F32]:
    """See ``kernels.top_scores``; ``columns``: int64 [rows, m], or none."""
    asked = np.empty((len(rows), 0), np.int64) if columns is None else columns
    found = top_scores(
        torch.from_numpy(logits),
        torch.from_numpy(rows),
        torch.from_numpy(np.ascontiguousarray(asked)),
        torch.tensor(counts, dtype=torch.int64),
    )
    scores, best, values = (tensor.numpy() for tensor in found)
    return scores, best, values


def _reported(best: I64, values: F32, width: int, chosen: bytes = b"") -> TokenScores:
    """The first ``width`` ids and scores of a row, and the score of the token ``chosen``."""
    ids = best[:width].astype(np.uint32)
    return TokenScores(
        chosen=chosen, width=len(ids), top_tokens=ids.tobytes(),
        top_values=values[:width].tobytes(),
    )  # fmt: skip
