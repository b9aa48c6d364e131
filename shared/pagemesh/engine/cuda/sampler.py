"""``engine.sampler`` on a device: logits stay there, and drawn ids come back in one transfer.

The order of operations and the meaning of parameters are those of ``engine.sampler``; every
operation here covers a whole block of rows. Two things are left to the host, which gets the logits
of only those rows: candidates of beam searches, and rows that report log-probabilities. Sums are
taken in the device's own order, so a uniform within rounding of a boundary between two tokens may
fall on the other side of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pagemesh.engine import sampler
from pagemesh.engine.cuda.graph_bytes import DRAW_ELEMENTS_MAX
from pagemesh.engine.sampler import TEMPERATURE_MIN, is_edited
from pagemesh.engine.uniform import uniforms
from pagemesh.engine.worker.plan import Drawn, Sample

I64 = NDArray[np.int64]
Tensor = torch.Tensor


def draw(logits: Tensor, rows: I64, samples: Sequence[Sample]) -> tuple[Drawn, ...]:
    """See ``engine.sampler.draw``; ``logits``: float32 [n, vocab] on any device, not modified."""
    hosted = np.array([_is_for_host(sample) for sample in samples], np.bool_)
    if hosted.all():
        return _draw_on_host(logits, rows, samples)
    if not hosted.any():
        return _draw_on_device(logits, rows, samples)
    out: dict[int, Drawn] = {}
    for mask, where in ((hosted, _draw_on_host), (~hosted, _draw_on_device)):
        places = np.flatnonzero(mask).tolist()
        drawn = where(logits, rows[places], [samples[place] for place in places])
        out.update(zip(places, drawn, strict=True))
    return tuple(out[place] for place in range(len(samples)))


def _is_for_host(sample: Sample) -> bool:
    return bool(sample.candidate_count) or sample.sampling.logprobs is not None


def _draw_on_host(logits: Tensor, rows: I64, samples: Sequence[Sample]) -> tuple[Drawn, ...]:
    used, own = np.unique(rows, return_inverse=True)
    if len(used) < len(logits):
        logits = logits[_on(logits, used)]
    return sampler.draw(logits.cpu().numpy(), own, samples)


def _draw_on_device(logits: Tensor, rows: I64, samples: Sequence[Sample]) -> tuple[Drawn, ...]:
    top, tokens = logits.max(-1)
    sound = top.abs() < float("inf")  # two operations, where ``isfinite`` is four
    places = None
    if not np.array_equal(rows, np.arange(len(logits))):
        places = _on(logits, rows)
        tokens, sound = tokens[places], sound[places]
    rest = [
        index
        for index, sample in enumerate(samples)
        if is_edited(sample) or sample.sampling.temperature > 0.0
    ]
    block = max(1, DRAW_ELEMENTS_MAX // logits.shape[1])
    for start in range(0, len(rest), block):
        part = rest[start : start + block]
        own = [samples[index] for index in part]
        at = _on(logits, np.array(part))
        work = logits[at if places is None else places[at]]
        tokens[at], sound[at] = _draw_block(work, own)
    # An unsound token comes back negative: one transfer, which waits for the device, for both.
    back = torch.where(sound, tokens, ~tokens).tolist()
    return tuple(
        Drawn(sample.key, max(token, ~token), poisoned=token < 0)
        for sample, token in zip(samples, back, strict=True)
    )


def _draw_block(work: Tensor, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Tokens, int64 [samples], and whether the highest logit is finite, bool [samples]. ``work``:
    float32 [samples, vocab], overwritten."""
    _edit(work, samples)
    tokens = work.argmax(-1)
    top = work.gather(1, tokens[:, None])
    sound = top[:, 0].isfinite()
    hot = np.flatnonzero([sample.sampling.temperature > 0.0 for sample in samples])
    if len(hot):
        if len(hot) < len(samples):
            at = _on(work, hot)
            own = [samples[index] for index in hot.tolist()]
            tokens[at] = _draw_random(work[at], top[at], own)
        else:
            tokens = _draw_random(work, top, samples)
    return tokens, sound


def _draw_random(work: Tensor, top: Tensor, samples: Sequence[Sample]) -> Tensor:
    """int64 [samples]. ``work``: float32 [samples, vocab], overwritten with weights: each token's
    probability divided by the row's highest; ``top`` [samples, 1]: each row's highest logit."""
    values = [sample.sampling for sample in samples]
    vocab = work.shape[1]
    numbers = np.array(
        [
            [max(one.temperature, TEMPERATURE_MIN) for one in values],
            [one.min_p for one in values],
            [one.top_p for one in values],
            [one.top_k if 0 < one.top_k < vocab else vocab for one in values],
            uniforms(
                np.array([one.seed for one in values], np.uint64),
                np.array([sample.key.choice for sample in samples], np.uint64),
                np.array([sample.generated_count for sample in samples], np.uint64),
            ),
        ],
        np.float64,
    )
    heat, min_p, top_p, top_k, uniform = _on(work, numbers).unsqueeze(-1)
    weights = work.sub_(top).div_(heat.float()).exp_()
    if np.any(numbers[1] > 0.0) or np.any(numbers[2] < 1.0) or np.any(numbers[3] < vocab):
        _limit(weights, min_p, top_p, top_k)
    sums = weights.cumsum(-1, dtype=torch.float64)
    whole = sums[:, -1:]
    # A uniform just below 1 may round up to the whole sum.
    target = torch.minimum(uniform * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(sums, target, right=True)[:, 0].clamp_(max=vocab - 1)


def _limit(weights: Tensor, min_p: Tensor, top_p: Tensor, top_k: Tensor) -> None:
    """Zero the weights that min_p, top_k and top_p ([rows, 1] each) exclude; among equals the
    lowest ids stay. The highest weight of a row is 1."""
    falling, ids = weights.sort(dim=-1, descending=True, stable=True)
    kept = falling >= min_p.float()
    kept &= torch.arange(weights.shape[1], device=weights.device) < top_k
    own = torch.where(kept, falling, 0.0).double()
    before = own.cumsum(-1) - own
    kept &= (before < top_p * own.sum(-1, keepdim=True)) | (top_p >= 1.0)
    weights.masked_fill_(~torch.zeros_like(kept).scatter_(1, ids, kept), 0.0)


def _edit(work: Tensor, samples: Sequence[Sample]) -> None:
    """Apply masks, biases and penalties to all rows at once, in place."""
    edited = [(row, sample) for row, sample in enumerate(samples) if is_edited(sample)]
    if not edited:
        return
    vocab = work.shape[1]
    masks = _Entries()
    biases = _Entries()
    repeats = _Entries()
    counts = _Entries()
    for row, sample in edited:
        values = sample.sampling
        if sample.generated_count < values.min_tokens:
            masks.add(row, np.asarray(values.stop_tokens, np.int64), 0.0)
        if values.logit_bias:
            ids = np.fromiter(values.logit_bias, np.int64, len(values.logit_bias))
            biases.add(row, ids, np.fromiter(values.logit_bias.values(), np.float32, len(ids)))
        if values.repetition_penalty != 1.0:
            repeats.add(row, sample.tokens.astype(np.int64), values.repetition_penalty)
        if values.frequency_penalty or values.presence_penalty:
            seen = sample.tokens[sample.prompt_count :].astype(np.int64)
            often = np.bincount(seen)[seen].astype(np.float32)
            counts.add(
                row, seen, np.float32(values.frequency_penalty) * often, values.presence_penalty
            )
    # A token that occurs twice is written twice, with the same value.
    for at, _ in masks.on(work, vocab):
        work[at] = float("-inf")
    _keep_allowed(work, edited)
    for at, (bias, _) in biases.on(work, vocab):
        work[at] += bias
    for at, (penalty, _) in repeats.on(work, vocab):
        old = work[at]
        work[at] = torch.where(old > 0, old / penalty, old * penalty)
    for at, (frequency, presence) in counts.on(work, vocab):
        work[at] = work[at] - frequency - presence


def _keep_allowed(work: Tensor, edited: Sequence[tuple[int, Sample]]) -> None:
    """Mask what the grammars of ``edited``, (row, sample) pairs, do not allow."""
    found = [(row, sample.allowed) for row, sample in edited if sample.allowed is not None]
    if found:
        rows = _on(work, np.array([row for row, _ in found]))
        allowed = _on(work, np.stack([mask for _, mask in found]))
        work[rows] = work[rows].masked_fill_(~allowed, float("-inf"))


class _Entries:
    """(row, token) pairs of a block and up to two numbers for each."""

    def __init__(self) -> None:
        self._pairs: list[I64] = []
        self._numbers: list[NDArray[np.float32]] = []

    def add(
        self, row: int, tokens: I64, first: NDArray[np.floating] | float, second: float = 0.0
    ) -> None:
        self._pairs.append(np.stack((np.full(len(tokens), row), tokens)))
        numbers = np.empty((2, len(tokens)), np.float32)
        numbers[0], numbers[1] = first, second
        self._numbers.append(numbers)

    def on(
        self, work: Tensor, vocab: int
    ) -> Iterator[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
        """Yields once, or never if there are no pairs: indices into ``work``, and the numbers, on
        its device."""
        if not self._pairs:
            return
        pairs, numbers = np.concatenate(self._pairs, 1), np.concatenate(self._numbers, 1)
        known = pairs[1] < vocab
        rows, tokens = _on(work, pairs[:, known])
        first, second = _on(work, numbers[:, known])
        yield (rows, tokens), (first, second)


def _on(like: Tensor, values: NDArray[np.generic]) -> Tensor:
    """``values`` on the device of ``like``."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
