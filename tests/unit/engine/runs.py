"""Runs (steps that continue by themselves) of a small model on a real pool, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tests.unit.engine.harness import some_tokens
from tests.unit.engine.models import VOCAB, save_twin, twins
from tests.unit.engine.test_executor import Host, make_row

from pagemesh.engine.loading import LoadedModel, load_model
from pagemesh.engine.worker.plan import Ahead, StepPlan, StepResult, StepRow, plan_after
from pagemesh.wire.work_messages import Sampling

LONG_US = 60e6
_TRIES = 100
"""Attempts to hit the middle of a run: it takes milliseconds, and so may waking a thread."""
GREEDY = Sampling(temperature=0.0, max_tokens=64)
HOT = Sampling(temperature=1.3, max_tokens=64, seed=9)
LIMITED = Sampling(temperature=0.8, max_tokens=64, seed=4, top_p=0.9, top_k=20)
Steps = tuple[tuple[StepPlan, StepResult], ...]


def load_twin(
    folder: Path, edit_head: Callable[[torch.Tensor], None] = lambda head: None
) -> tuple[LoadedModel, object]:
    """A small model made in ``folder``, as loaded by the engine and by ``transformers``."""
    twin = save_twin(folder / "model", twins()["qwen2-bias"], edit_head=edit_head)
    return load_model(folder / "model", name="m", page_size=16, cache=folder / "cache"), twin


def plan_of(
    host: Host, *samplings: Sampling, repeat_count: int, stops: frozenset[int] = frozenset()
) -> StepPlan:
    """The first step of a run with one sequence per sampling; all but the last token of each prompt
    is computed."""
    rows: list[StepRow] = []
    for lease, sampling in enumerate(samplings, start=1):
        prompt = some_tokens(20 + 7 * lease, vocab=VOCAB, seed=lease)
        table = host.grant(lease, len(prompt) + repeat_count + 1)
        host.run(make_row(lease, table, prompt, 0, len(prompt) - 1))
        row = make_row(lease, table, prompt, len(prompt) - 1, 1, sampling=sampling)
        rows.append(replace(row, stops=stops))
    return StepPlan(1, tuple(rows), repeat_count=repeat_count)


def one_by_one(host: Host, plan: StepPlan) -> Steps:
    """Compute the whole run step by step, without drafts."""
    steps = []
    following: StepPlan | None = plan
    while following is not None:
        result = host.executor.run(following)
        steps.append((following, result))
        following = plan_after(following, result)
    return tuple(steps)


def ahead(host: Host, plan: StepPlan, *, for_us: float = LONG_US) -> Steps:
    """Compute the whole run, in as many calls as it takes."""
    steps: list[tuple[StepPlan, StepResult]] = []
    following: StepPlan | None = plan
    while following is not None:
        steps.append((following, host.executor.run_on(following, Ahead(for_us))))
        following = plan_after(*steps[-1])
    return tuple(steps)


def call(host: Host, plan: StepPlan, given: Ahead | None = None) -> Steps:
    """One call of the executor, which computes as much of the run as it may."""
    return ((plan, host.executor.run_on(plan, given or Ahead(LONG_US))),)


def call_amid_which_the_second_lease_ends(host: Host, plan: StepPlan) -> Steps:
    """One call of the executor with more than one step, during which the lease of row 1 ends."""
    page = host.pool.pages.memory.view(host.pool.page_count, -1)[int(plan.rows[1].page_table[5])]
    begun = page.numpy()
    stands = host.file.headers.lease_word(2)

    def revoke() -> None:
        deadline_s = time.monotonic() + 10.0
        while not begun[:64].any() and time.monotonic() < deadline_s:
            continue
        host.file.headers.set_lease_word(2, 99)

    for _ in range(_TRIES):
        page.zero_()
        host.file.headers.set_lease_word(2, stands)
        revoking = threading.Thread(target=revoke)
        revoking.start()
        steps = call(host, plan)
        revoking.join()
        is_amid = 1 < step_count(steps) <= plan.repeat_count  # a whole run has one more step
        if is_amid and steps[0][1].rows[1].revoked:
            return steps
    raise AssertionError("revoked before or after each run")


def tokens_of(steps: Steps, row: int) -> list[int]:
    """The tokens that a row drew."""
    outcomes = [result.rows[row] for _, result in steps]
    return [token for one in outcomes for token in (*one.before, *(d.token for d in one.drawn))]


def all_tokens(steps: Steps) -> list[list[int]]:
    """The tokens that each row drew."""
    return [tokens_of(steps, row) for row in range(len(steps[0][0].rows))]


def step_count(steps: Steps) -> int:
    """The number of steps."""
    return sum(len(result.took_us) for _, result in steps)
