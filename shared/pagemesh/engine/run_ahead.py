"""Steps of a run in one native call: which plans allow it, and what came of each step.

The rules are those of ``plan_after`` and of ``sampler``, and so are the bits: what is left to
Python is a run's last step, which draws as any step does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagemesh.engine.sampler import TEMPERATURE_MIN, is_edited, is_limited
from pagemesh.engine.uniform import uniforms
from pagemesh.engine.worker.plan import (
    Ahead,
    Drawn,
    RowResult,
    Sample,
    StepPlan,
    StepResult,
    plan_after,
)
from pagemesh.kernels.native.headers import LeaseWatch
from pagemesh.kernels.ops import Heat, RunDone, RunTerms

_ANY_VOCAB = 1 << 62


def can_run(plan: StepPlan) -> bool:
    """Whether more steps may follow, which draw one plain token a row and nothing else."""
    if plan.copies or not plan.repeat_count:
        return False
    hot = {row.samples[0].sampling.temperature > 0.0 for row in plan.rows if row.samples}
    return len(hot) == 1 and all(
        len(row.tokens) == len(row.samples) == 1
        and row.score_from is None
        and _is_plain(row.samples[0])
        for row in plan.rows
    )


def terms_of(plan: StepPlan, leases: LeaseWatch, ahead: Ahead) -> RunTerms:
    """For the steps of a plan that ``can_run``."""
    samples = [row.samples[0] for row in plan.rows]
    count = plan.repeat_count + 1
    return RunTerms(
        step_count=count,
        leases=leases,
        stops=[tuple(row.stops) for row in plan.rows],
        heat=_heat(samples, count) if samples[0].sampling.temperature > 0.0 else None,
        for_us=ahead.for_us,
        end=ahead.end,
        waiting=ahead.waiting,
    )


def unrolled(plan: StepPlan, done: RunDone) -> tuple[list[tuple[StepPlan, StepResult]], StepPlan]:
    """Plan and result of each step but the last, and the plan of the last."""
    steps: list[tuple[StepPlan, StepResult]] = []
    for tokens, took_us in zip(done.drawn.tolist(), done.took_us.tolist(), strict=False):
        rows = tuple(
            RowResult(row.key, row.lease, False, (Drawn(row.samples[0].key, token),))
            for row, token in zip(plan.rows, tokens, strict=True)
        )
        result = StepResult(plan.step, rows, int(took_us))
        steps.append((plan, result))
        following = plan_after(plan, result)
        if following is None:
            raise RuntimeError(f"step {plan.step} of a run went on where it had to end")
        plan = following
    return steps, plan


def _is_plain(sample: Sample) -> bool:
    return not (
        sample.candidate_count
        or sample.beam_length
        or sample.sampling.logprobs is not None
        or is_edited(sample)
    )


def _heat(samples: Sequence[Sample], step_count: int) -> Heat:
    values = [sample.sampling for sample in samples]
    steps = np.arange(step_count, dtype=np.uint64)[:, None]
    first = np.array([sample.generated_count for sample in samples], np.uint64)
    heat = Heat(
        np.maximum(np.array([one.temperature for one in values], np.float32), TEMPERATURE_MIN),
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
