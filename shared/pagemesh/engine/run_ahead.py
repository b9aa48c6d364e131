"""Several steps of a run in one native call: which plans allow it, and how results are read.

The rules are those of ``plan_after`` and ``sampler``, and results are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagemesh.engine.sampler import TEMPERATURE_MIN, is_edited, is_limited
from pagemesh.engine.uniform import uniforms
from pagemesh.engine.worker.plan import (
    Ahead,
    Drawn,
    RowResult,
    Sample,
    StepPlan,
    StepRow,
)
from pagemesh.kernels.native.headers import LeaseWatch
from pagemesh.kernels.native.library import CHANCES
from pagemesh.kernels.ops import Drafts, Heat, RunDone, RunTerms
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.tokens import U32

F32 = NDArray[np.float32]

_ANY_VOCAB = 1 << 62
_HISTORY_TOKENS_MAX = 16_384
"""The latest tokens of a sequence, in which drafts are looked for."""
_STEP_ROWS_MAX = 32
"""Rows of a step, drafts included; each has logits as wide as the vocabulary."""


def can_run(plan: StepPlan) -> bool:
    """Whether more steps may follow and each row does nothing but draw one plain token."""
    if plan.copies or not plan.repeat_count:
        return False
    return all(
        len(row.tokens) == len(row.samples) == 1
        and row.score_from is None
        and _is_plain(row.samples[0])
        for row in plan.rows
    )


class Guesses:
    """Drafts, at most ``draft_tokens_max`` per sequence and step, and how likely they are right."""

    def __init__(self, draft_tokens_max: int) -> None:
        self._each_max = draft_tokens_max
        self._chances: dict[SequenceKey, F32] = {}
        """By sequence of the last run, which updates them in place."""

    @property
    def wanted(self) -> bool:
        """Whether drafts are enabled."""
        return self._each_max > 0

    def drafts(self, plan: StepPlan) -> Drafts | None:
        """The drafts of a run; ``None`` when they are disabled or there is no room for any."""
        if not self._each_max or len(plan.rows) >= _STEP_ROWS_MAX:
            return None
        samples = [row.samples[0] for row in plan.rows]
        none = np.zeros(CHANCES, np.float32)
        chances = np.stack([self._chances.get(sample.key, none) for sample in samples])
        self._chances = {sample.key: own for sample, own in zip(samples, chances, strict=True)}
        return Drafts(
            [_history(sample) for sample in samples], chances, self._each_max, _STEP_ROWS_MAX
        )


def terms_of(plan: StepPlan, leases: LeaseWatch, ahead: Ahead, guesses: Guesses) -> RunTerms:
    """The terms of a run of ``plan``, for which ``can_run`` must hold."""
    samples = [row.samples[0] for row in plan.rows]
    count = plan.repeat_count + 1
    return RunTerms(
        token_count=count,
        leases=leases,
        stops=[tuple(row.stops) for row in plan.rows],
        heat=_heat(samples, count),
        for_us=ahead.for_us,
        end=ahead.end,
        waiting=ahead.waiting,
        drafts=guesses.drafts(plan),
    )


def results_of(plan: StepPlan, done: RunDone) -> list[RowResult]:
    """What the steps of a run drew, row by row."""
    return [
        _result(row, tokens[:count], drafted)
        for row, tokens, count, drafted in zip(
            plan.rows, done.drawn.tolist(), done.counts.tolist(), done.drafted.tolist(),
            strict=True,
        )
    ]  # fmt: skip


def _result(row: StepRow, tokens: list[int], drafted_count: int) -> RowResult:
    *before, last = tokens
    drawn = Drawn(row.samples[0].key, max(last, 0), poisoned=last < 0)
    return RowResult(
        row.key, row.lease, False, (drawn,), before=tuple(before), drafted_count=drafted_count
    )


def _history(sample: Sample) -> U32:
    tokens = sample.context[-_HISTORY_TOKENS_MAX:]
    return np.concatenate((tokens, np.array(sample.drawn, tokens.dtype)))


def _is_plain(sample: Sample) -> bool:
    return not (
        sample.candidate_count
        or sample.beam_length
        or sample.sampling.logprobs is not None
        or sample.sampling.grammar
        or is_edited(sample)
    )


def _heat(samples: Sequence[Sample], step_count: int) -> Heat | None:
    values = [sample.sampling for sample in samples]
    temperatures = np.array([one.temperature for one in values], np.float64)
    hot = temperatures > 0.0
    if not hot.any():
        return None
    steps = np.arange(step_count, dtype=np.uint64)[:, None]
    first = np.array([sample.generated_count for sample in samples], np.uint64)
    heat = Heat(
        np.where(hot, np.maximum(temperatures.astype(np.float32), TEMPERATURE_MIN), np.float32(0)),
        uniforms(
            np.array([one.seed for one in values], np.uint64),
            np.array([sample.key.choice for sample in samples], np.uint64),
            first + steps,
        ),
    )
    if not any(is_limited(one, _ANY_VOCAB) for one in values):
        return heat
    return Heat(
        heat.temperatures,
        heat.uniforms,
        np.array([one.min_p for one in values], np.float32),
        np.array([one.top_k for one in values], np.int64),
        np.array([one.top_p for one in values], np.float64),
    )
