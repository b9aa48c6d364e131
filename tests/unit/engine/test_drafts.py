"""Drafts change how many steps a run takes, and no bit of what it draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.engine import runs
from tests.unit.engine.harness import some_tokens
from tests.unit.engine.models import VOCAB
from tests.unit.engine.runs import (
    GREEDY,
    HOT,
    LIMITED,
    LONG_US,
    Steps,
    ahead,
    all_tokens,
    call,
    call_amid_which_the_second_lease_ends,
    load_twin,
    one_by_one,
    step_count,
    tokens_of,
)
from tests.unit.engine.test_executor import Host, make_row

from pagemesh.engine import run_ahead
from pagemesh.engine.executor import ModelExecutor
from pagemesh.engine.loading import LoadedModel
from pagemesh.engine.worker.plan import Ahead, StepPlan, plan_after
from pagemesh.kernels.native.library import CpuLevel
from pagemesh.kernels.ops import Drafts, RunTerms
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import Sampling

EACH_MAX = 7
REPEATS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, object]:
    return load_twin(tmp_path_factory.mktemp("drafts"))


@pytest.fixture
def host(model: tuple[LoadedModel, object], tmp_path: Path) -> Iterator[Host]:
    made = Host(*model, tmp_path)
    made.executor.close()
    made.executor = guessing(made)
    yield made
    made.executor.close()
    made.file.remove()


def guessing(host: Host) -> ModelExecutor:
    executor = ModelExecutor(host.decoder, host.model.layout, draft_tokens_max=EACH_MAX)
    executor.use(host.pool)
    return executor


def plan_of(host: Host, *samplings: Sampling, repeat_count: int = REPEATS) -> StepPlan:
    return runs.plan_of(host, *samplings, repeat_count=repeat_count)


def alone(host: Host, plan: StepPlan) -> list[list[int]]:
    """What each row draws, step by step and without drafts."""
    return all_tokens(one_by_one(host, plan))


def knowing(plan: StepPlan, tokens: list[list[int]]) -> StepPlan:
    """``plan`` with rows whose history has ``tokens`` after what each ends with."""
    rows = []
    for row, own in zip(plan.rows, tokens, strict=True):
        (sample,) = row.samples
        told = np.concatenate((sample.context, np.array(own, np.uint32), sample.context))
        more = len(told) - len(sample.context)
        known = replace(sample, context=told, prompt_count=sample.prompt_count + more)
        rows.append(replace(row, samples=(known,)))
    return replace(plan, rows=tuple(rows))


def assert_drawn(steps: Steps, tokens: list[list[int]]) -> None:
    """Each row drew ``tokens``, as far as it came until what all may draw was used up."""
    own = all_tokens(steps)
    assert own == [whole[: len(one)] for one, whole in zip(own, tokens, strict=True)]
    assert max(map(len, own)) <= len(tokens[0])
    used = [max(1 + len(row.before) for row in result.rows) for _, result in steps]
    assert sum(used) == len(tokens[0])
    for plan, result in steps:
        single = len(result.took_us) == 1
        assert all(row.drafted_count <= plan.repeat_count for row in result.rows if single)


def drafted(steps: Steps) -> int:
    return sum(row.drafted_count for _, result in steps for row in result.rows)


def accepted(steps: Steps) -> int:
    return sum(result.accepted_count(row) for _, result in steps for row in result.rows)


@pytest.mark.parametrize(
    "samplings",
    [(GREEDY,), (GREEDY,) * 3, (HOT,) * 2, (HOT, LIMITED, HOT), (HOT, GREEDY, LIMITED)],
    ids=["one", "greedy", "hot", "limited", "mixed"],
)
def test_drafts_that_are_right_save_steps_and_change_no_token(
    level: CpuLevel, host: Host, samplings: tuple[Sampling, ...]
) -> None:
    plan = plan_of(host, *samplings)
    tokens = alone(host, plan)
    each = ahead(host, knowing(plan, tokens), for_us=1.0)
    assert_drawn(each, tokens)
    host.executor = guessing(host)
    steps = ahead(host, knowing(plan, tokens))
    assert_drawn(steps, tokens)
    assert drafted(steps) == drafted(each) and accepted(steps) == accepted(each)
    assert step_count(steps) < len(tokens[0]) and accepted(steps)
    if len(samplings) == 1:
        assert step_count(steps) <= -(-len(tokens[0]) // 4), "two drafts, then more and more"


@pytest.mark.parametrize(("rows_max", "most"), [(2, 0), (3, 0), (4, 1), (7, 4)])
def test_a_step_has_no_more_rows_than_it_may(
    host: Host, monkeypatch: pytest.MonkeyPatch, rows_max: int, most: int
) -> None:
    monkeypatch.setattr(run_ahead, "_STEP_ROWS_MAX", rows_max)
    plan = plan_of(host, GREEDY, GREEDY, GREEDY)
    tokens = alone(host, plan)
    steps = ahead(host, knowing(plan, tokens), for_us=1.0)
    assert_drawn(steps, tokens)
    counts = [sum(row.drafted_count for row in result.rows) for _, result in steps]
    assert max(counts) == most


def test_sequences_have_an_even_share_of_what_room_there_is(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_ahead, "_STEP_ROWS_MAX", 9)
    plan = plan_of(host, GREEDY, GREEDY, GREEDY)
    result = host.executor.run_on(knowing(plan, alone(host, plan)), Ahead(1.0))
    assert [row.drafted_count for row in result.rows] == [2, 2, 2]


def test_drafts_are_as_many_as_may_be_drawn_or_have_a_slot(host: Host) -> None:
    plan = plan_of(host, GREEDY, repeat_count=7)
    known = knowing(plan, alone(host, plan))
    result = host.executor.run_on(known, Ahead(1.0))
    assert result.rows[0].drafted_count == len(result.rows[0].before) == 7
    (row,) = known.rows
    short = replace(row, page_table=row.page_table[:2])
    result = host.executor.run_on(replace(known, rows=(short,)), Ahead(1.0))
    assert row.start + 1 + result.rows[0].drafted_count == 2 * 16


@pytest.mark.parametrize("seed", range(12))
def test_wrong_drafts_change_no_token(host: Host, seed: int) -> None:
    dice = np.random.default_rng(seed)
    samplings = [(GREEDY, GREEDY), (HOT, HOT), (GREEDY, HOT)][seed % 3]
    plan = plan_of(host, *samplings)
    tokens = alone(host, plan)
    told = [list(own) for own in tokens]
    for own in told:
        for at in dice.integers(0, len(own), 4):
            own[at] = int(dice.integers(0, VOCAB))
    for for_us in (LONG_US, 1.0):
        steps = ahead(host, knowing(plan, told), for_us=for_us)
        assert_drawn(steps, tokens)
        starts = [plan.rows[0].start for plan, _ in steps]
        grown = [len(tokens_of((one,), 0)) for one in steps]
        assert starts[1:] == [a + b for a, b in zip(starts, grown, strict=True)][:-1]


def misleading(plan: StepPlan, row: int, tokens: list[int], length: int = 3) -> list[int]:
    """Text in which every ``length`` of a row's tokens lead to another than in ``tokens``."""
    (sample,) = plan.rows[row].samples
    whole = [*sample.context.tolist()[-length:], *tokens]
    return [
        one
        for at in range(len(whole) - length)
        for one in (*whole[at : at + length], (whole[at + length] + 1) % VOCAB)
    ]


def test_what_is_wrong_again_and_again_is_tried_no_more(host: Host) -> None:
    plan = plan_of(host, HOT, repeat_count=120)
    tokens = alone(host, plan)
    steps = ahead(host, knowing(plan, [misleading(plan, 0, tokens[0])]), for_us=1.0)
    counts = [result.rows[0].drafted_count for _, result in steps]
    assert tokens_of(steps, 0) == tokens[0] and 2 <= sum(counts) <= 16
    assert not any(counts[30:])


def test_one_right_guess_among_many_wrong_ones_is_no_reason_to_try_again(host: Host) -> None:
    plan = plan_of(host, HOT, repeat_count=120)
    tokens = alone(host, plan)
    told = misleading(plan, 0, tokens[0])
    told[4 * 50 + 3] = tokens[0][50]
    steps = ahead(host, knowing(plan, [told]), for_us=1.0)
    assert not any(result.rows[0].drafted_count for _, result in steps[30:])


def test_what_comes_to_be_right_is_tried_again(host: Host) -> None:
    plan = plan_of(host, HOT, repeat_count=120)
    tokens = alone(host, plan)
    told = [*misleading(plan, 0, tokens[0][:80], length=8), *tokens[0][72:]]
    steps = ahead(host, knowing(plan, [told]), for_us=1.0)
    counts = [result.rows[0].drafted_count for _, result in steps]
    assert tokens_of(steps, 0) == tokens[0]
    assert not any(counts[40:78]) and EACH_MAX in counts[80:]


def test_a_step_by_itself_has_drafts_too(host: Host) -> None:
    plan = plan_of(host, GREEDY)
    tokens = alone(host, plan)
    steps = call(host, knowing(plan, tokens), Ahead(0.0))
    assert step_count(steps) == 1 and tokens_of(steps, 0) == tokens[0][: EACH_MAX + 1]


def test_what_is_right_all_along_is_drafted_in_full(host: Host) -> None:
    plan = plan_of(host, HOT, repeat_count=120)
    steps = ahead(host, knowing(plan, alone(host, plan)), for_us=1.0)
    counts = [result.rows[0].drafted_count for _, result in steps]
    assert counts[:-1] == [EACH_MAX] * (len(counts) - 1)


def test_sequences_learn_apart_what_their_guesses_are_worth(host: Host) -> None:
    plan = plan_of(host, HOT, HOT, repeat_count=120)
    tokens = alone(host, plan)
    known = knowing(plan, [misleading(plan, 0, tokens[0]), tokens[1]])
    steps = ahead(host, known, for_us=1.0)
    wrong, right = zip(*([row.drafted_count for row in r.rows] for _, r in steps), strict=True)
    assert sum(wrong) <= 16 and not any(wrong[8:]) and all(right[8:-1])
    assert tokens_of(steps, 1) == tokens[1]


def test_a_stop_among_drafts_ends_a_run_with_the_token_that_it_is(host: Host) -> None:
    plan = plan_of(host, GREEDY, GREEDY)
    tokens = alone(host, plan)
    at = next(n for n in range(3, REPEATS) if tokens[1][n] not in tokens[1][:n] + tokens[0])
    stops = frozenset({tokens[1][at]})
    rows = tuple(replace(row, stops=stops) for row in knowing(plan, tokens).rows)
    steps = call(host, replace(plan, rows=rows))
    assert tokens_of(steps, 1) == tokens[1][: at + 1] and step_count(steps) < at
    own = tokens_of(steps, 0)
    assert own == tokens[0][: len(own)]
    assert plan_after(*steps[-1]) is None


def test_drafts_write_no_slot_beyond_what_may_be_drawn(host: Host) -> None:
    plan = plan_of(host, GREEDY, repeat_count=5)
    tokens = alone(host, plan)
    row = plan.rows[0]
    row = replace(row, page_table=host.grant(1, row.start + 6))
    host.run(make_row(1, row.page_table, row.samples[0].context, 0, row.start))
    kept = host.pool.pages.memory.clone()
    beyond = tokens[0] + [1, 2, 3, 4, 5, 6, 7, 8]
    steps = ahead(host, knowing(replace(plan, rows=(row,)), [beyond]))
    assert tokens_of(steps, 0) == tokens[0]
    changed = (host.pool.pages.memory != kept).view(host.pool.page_count, -1).any(1)
    assert set(changed.nonzero()[:, 0].tolist()) <= set(row.page_table.tolist())
    assert sum(result.rows[0].drafted_count for _, result in steps) <= 6


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_drafts_end_where_a_table_does(host: Host, sampling: Sampling) -> None:
    plan = plan_of(host, sampling)
    tokens = alone(host, plan)
    (row,) = knowing(plan, tokens).rows
    short = replace(row, page_table=row.page_table[:-1])
    slots = len(short.page_table) * 16 - row.start
    steps = call(host, replace(plan, rows=(short,)))
    assert slots < REPEATS and accepted(steps)
    assert tokens_of(steps, 0) == tokens[0][:slots]


def test_drafts_end_with_the_last_position_of_the_model(host: Host) -> None:
    positions, left = 512, 23
    prompt = some_tokens(positions - left + 1, vocab=VOCAB)
    table = host.grant(1, positions + 64)
    host.run(make_row(1, table, prompt, 0, len(prompt) - 1))
    row = make_row(1, table, prompt, len(prompt) - 1, 1, sampling=GREEDY)
    tokens = alone(host, StepPlan(1, (row,), repeat_count=left - 1))
    known = knowing(StepPlan(1, (row,), repeat_count=REPEATS), [tokens[0] + tokens[0]])
    steps = call(host, known)
    assert len(tokens[0]) == left and accepted(steps)
    assert tokens_of(steps, 0) == tokens[0]


def test_a_lease_that_ended_takes_its_drafts_along(host: Host) -> None:
    plan = plan_of(host, GREEDY, GREEDY)
    known = knowing(plan, alone(host, plan))
    run = host.decoder.run

    class Ending:
        def __init__(self) -> None:
            self.run = self.revoking

        def revoking(self, *arguments: object) -> object:
            host.file.headers.set_lease_word(2, 99)
            return run(*arguments)  # type: ignore[arg-type, misc]

    host.executor._decoder = Ending()  # type: ignore[assignment]
    result = host.executor.run_on(known, Ahead(LONG_US))
    assert [row.revoked for row in result.rows] == [False, True] and len(result.took_us) == 1
    assert not result.rows[1].before and not result.rows[1].drawn


def test_a_lease_that_ends_between_two_steps_leaves_the_other_row_what_is_its_own(
    host: Host,
) -> None:
    plan = plan_of(host, GREEDY, GREEDY, repeat_count=200)
    tokens = alone(host, plan)
    known = knowing(plan, tokens)
    steps = call_amid_which_the_second_lease_ends(host, known)
    assert accepted(steps)
    own = tokens_of(steps, 0)
    assert own == tokens[0][: len(own)] and not tokens_of(steps, 1)


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_a_row_of_no_numbers_ends_a_run_amid_its_drafts(host: Host, sampling: Sampling) -> None:
    plan = plan_of(host, sampling, sampling)
    tokens = alone(host, plan)
    page = int(plan.rows[1].page_table[0])
    host.pool.pages.memory.view(host.pool.page_count, -1)[page].view(torch.float32).fill_(
        float("nan")
    )
    result = host.executor.run_on(knowing(plan, tokens), Ahead(LONG_US))
    assert [row.poisoned for row in result.rows] == [False, True] and len(result.took_us) == 1
    assert not result.rows[1].before
    first = result.rows[0]
    assert [*first.before, first.drawn[0].token] == tokens[0][: 1 + len(first.before)]


def test_drafts_that_do_not_fit_are_refused(host: Host) -> None:
    plan = plan_of(host, GREEDY, GREEDY, repeat_count=3)
    made = host.executor._arrays.arrays(plan.rows)
    leases = host.pool.watch([1, 2], [1, 2])
    run = host.decoder.run
    assert run is not None
    history: U32 = np.arange(4, dtype=np.uint32)
    for drafts in (
        Drafts([history], np.zeros((2, 2), np.float32), 4, 16),
        Drafts([history, history], np.zeros((1, 2), np.float32), 4, 16),
        Drafts([history, history], np.zeros((2, 2)), 4, 16),  # type: ignore[arg-type]
    ):
        terms = RunTerms(3, leases, [(), ()], drafts=drafts)
        with pytest.raises(ValueError, match="expected"):
            run(made.tokens, made.batch, made.wanted, host.pool.pages, terms)
