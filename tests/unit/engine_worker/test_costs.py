"""What steps cost, learnt from those that were run."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from pagemesh.engine.worker.costs import StepCosts, StepShape, drawing, prompt

BASE_US, ROW_US, SLOT_US, TOKEN_US, PAIR_US = 20_000.0, 400.0, 0.5, 500.0, 0.04
CONTEXT_TOKENS = 1_000


def true_us(shape: StepShape) -> float:
    drawing_us = ROW_US * shape.drawing_rows + SLOT_US * shape.read_slots
    return BASE_US + drawing_us + TOKEN_US * shape.prompt_tokens + PAIR_US * shape.pairs


def draws(count: int) -> StepShape:
    return drawing([CONTEXT_TOKENS] * count)


def learnt(*, noise: float = 0.0, prompts: bool = True) -> StepCosts:
    """Costs after steps of many kinds, the duration of each off by up to ``noise``."""
    dice, costs = random.Random(1), StepCosts()
    for index in range(60):
        shape = drawing([dice.randrange(2_000) for _ in range(dice.randrange(1, 9))])
        if prompts and index % 2:
            shape += prompt(dice.randrange(3_000), dice.randrange(8, 200))
        costs.observe(shape, true_us(shape) * dice.uniform(1 - noise, 1 + noise))
    return costs


@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.02), (0.15, 0.2)])
def test_the_time_of_a_step_is_learnt_from_the_steps_before(noise: float, error: float) -> None:
    costs = learnt(noise=noise)
    for shape in (draws(1), draws(8), draws(4) + prompt(500, 64), draws(2) + prompt(2_000, 256)):
        assert costs.us(shape) == pytest.approx(true_us(shape), rel=error)


def test_tokens_within_a_time_take_that_time() -> None:
    costs = learnt()
    for start in (0, 1_000, 6_000):
        count = costs.tokens_within(100_000, start)
        assert costs.prompt_us(start, count) <= 100_000 < costs.prompt_us(start, count + 2)
    assert costs.tokens_within(100_000, 6_000) < costs.tokens_within(100_000, 0)


def test_long_decoding_does_not_make_the_cost_of_prompts_forgotten() -> None:
    costs = learnt()
    for _ in range(2_000):
        costs.observe(draws(4), true_us(draws(4)))
    assert costs.prompt_us(0, 100) == pytest.approx(true_us(prompt(0, 100)) - BASE_US, rel=0.1)


def test_a_machine_that_became_slower_is_learnt_within_some_steps() -> None:
    costs = learnt()
    for _ in range(100):
        costs.observe(draws(4), 3 * true_us(draws(4)))
    assert costs.us(draws(4)) == pytest.approx(3 * true_us(draws(4)), rel=0.2)


def test_one_step_that_was_held_up_changes_little() -> None:
    costs = learnt()
    costs.observe(draws(4), 100 * true_us(draws(4)))
    assert costs.us(draws(4)) == pytest.approx(true_us(draws(4)), rel=0.1)


def test_a_machine_that_became_far_slower_is_learnt_as_fast_as_one_that_did_a_little() -> None:
    costs = learnt()
    for _ in range(50):
        costs.observe(draws(4), 100 * true_us(draws(4)))
    assert costs.us(draws(4)) > 2 * true_us(draws(4))


def test_a_step_that_took_what_was_expected_is_learnt_without_a_fit() -> None:
    class Counted(StepCosts):
        fit_count = 0

        def _solve(self) -> NDArray[np.float64]:
            self.fit_count += 1
            return super()._solve()

    costs = Counted()
    for _ in range(100):
        costs.observe(draws(4), true_us(draws(4)))
    fitted = costs.fit_count
    assert costs.us(draws(4)) == pytest.approx(true_us(draws(4)), rel=0.01)
    assert fitted <= 2, "a fit takes time between two steps: only where one may be an outlier"


def test_nothing_costs_less_than_nothing() -> None:
    costs = StepCosts()
    for rows in range(1, 20):
        costs.observe(draws(rows), 10_000 - 400 * rows)
    assert costs.us(StepShape(drawing_rows=10_000)) > 0
    assert costs.us(StepShape()) >= 0


def test_a_step_without_a_duration_teaches_nothing() -> None:
    costs = StepCosts()
    costs.observe(prompt(0, 8), 0)
    assert not costs.knows_prompts
