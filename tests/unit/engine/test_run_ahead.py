"""Steps of a run in one native call have the bits of steps one by one, and end where they must."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
    plan_of,
    step_count,
)
from tests.unit.engine.test_executor import Host

from pagemesh.engine import run_ahead
from pagemesh.engine.loading import LoadedModel
from pagemesh.engine.run_ahead import can_run
from pagemesh.engine.worker.plan import Ahead, plan_after
from pagemesh.kernels.native.headers import address_of
from pagemesh.kernels.ops import Heat, RunTerms
from pagemesh.wire.work_messages import Sampling


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, object]:
    return load_twin(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def host(model: tuple[LoadedModel, object], tmp_path: Path) -> Iterator[Host]:
    made = Host(*model, tmp_path)
    yield made
    made.executor.close()
    made.file.remove()


def starts(steps: Steps) -> list[list[int]]:
    return [[row.start for row in plan.rows] for plan, _ in steps]


@pytest.mark.parametrize(
    "samplings",
    [(GREEDY,), (GREEDY,) * 3, (HOT, HOT), (HOT, LIMITED, HOT), (GREEDY, HOT, GREEDY, LIMITED)],
    ids=["one greedy", "greedy", "hot", "limited", "mixed"],
)
def test_a_run_draws_what_its_steps_draw_one_by_one(
    host: Host, samplings: tuple[Sampling, ...]
) -> None:
    plan = plan_of(host, *samplings, repeat_count=20)  # past the ends of pages
    alone = one_by_one(host, plan)
    kept = host.pool.pages.memory.clone()
    ((_, result),) = whole = call(host, plan)
    assert step_count(whole) == len(alone) == 21
    assert all_tokens(whole) == all_tokens(alone)
    assert all(step_us > 0 for step_us in result.took_us)
    assert not any(row.drafted_count or result.accepted_count(row) for row in result.rows)
    assert torch.equal(host.pool.pages.memory, kept)
    each = ahead(host, plan, for_us=1.0)
    assert starts(each) == starts(alone)
    assert [result.rows for _, result in each] == [result.rows for _, result in alone]


def test_what_a_call_takes_beside_its_steps_is_time_of_the_last(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(host, GREEDY, repeat_count=3)
    prepare = run_ahead.terms_of

    def slowly(*arguments: Any) -> RunTerms:
        time.sleep(0.05)
        return prepare(*arguments)

    monkeypatch.setattr(run_ahead, "terms_of", slowly)
    result = host.executor.run_on(plan, Ahead(LONG_US))
    assert len(result.took_us) == 4 and result.took_us[-1] >= 50_000


def test_a_stop_ends_a_run_with_the_step_that_drew_it(host: Host) -> None:
    plan = plan_of(host, GREEDY, GREEDY, repeat_count=20)
    tokens = all_tokens(one_by_one(host, plan))
    stop = tokens[1][7]
    at = min(own.index(stop) for own in tokens if stop in own)
    stopping = plan_of(host, GREEDY, GREEDY, repeat_count=20, stops=frozenset({stop}))
    stopped = call(host, stopping)
    assert all_tokens(stopped) == [own[: at + 1] for own in tokens]
    assert plan_after(*stopped[-1]) is None


def test_a_run_ends_after_the_step_at_which_somebody_wants_it_to(host: Host) -> None:
    plan = plan_of(host, GREEDY, repeat_count=20)
    wanted = np.ones(1, np.uint32)
    assert step_count(call(host, plan, Ahead(LONG_US, wanted))) == 1
    word = np.ones(1, np.uint64)
    assert step_count(call(host, plan, Ahead(LONG_US, waiting=(address_of(word),)))) == 1
    word[0] = 0
    assert step_count(call(host, plan, Ahead(LONG_US, waiting=(address_of(word),)))) == 21
    assert step_count(call(host, plan, Ahead(0.0))) == 1


def test_a_lease_that_ended_ends_a_run_and_what_its_row_computed_counts_for_nothing(
    host: Host,
) -> None:
    plan = plan_of(host, GREEDY, GREEDY, repeat_count=20)
    run = host.decoder.run

    class Ending:
        def __init__(self) -> None:
            self.run = self.revoking

        def revoking(self, *arguments: object) -> object:
            host.file.headers.set_lease_word(2, 99)
            return run(*arguments)  # type: ignore[arg-type, misc]

        def __getattr__(self, name: str) -> object:
            return getattr(host.decoder, name)

    host.executor._decoder = Ending()  # type: ignore[assignment]
    result = host.executor.run_on(plan, Ahead(LONG_US))
    assert [row.revoked for row in result.rows] == [False, True] and len(result.took_us) == 1
    assert result.rows[1].drawn == () and result.rows[0].drawn


def test_a_lease_that_ends_in_the_middle_of_a_run_ends_it_with_the_step_at_hand(
    host: Host,
) -> None:
    plan = plan_of(host, GREEDY, GREEDY, repeat_count=200)
    alone = all_tokens(one_by_one(host, plan))
    whole = call_amid_which_the_second_lease_ends(host, plan)
    assert step_count(whole) < 201
    assert all_tokens(whole) == [alone[0][: step_count(whole)], []]
    assert [row.revoked for row in whole[0][1].rows] == [False, True]


def test_a_run_ends_where_a_table_does(host: Host) -> None:
    plan = plan_of(host, GREEDY, repeat_count=3)
    table = plan.rows[0].page_table
    slots = len(table) * 16 - plan.rows[0].start
    longer = replace(plan, repeat_count=slots + 5)
    assert step_count(call(host, longer)) == slots


def test_terms_that_do_not_fit_are_refused_before_anything_is_written(host: Host) -> None:
    plan = plan_of(host, GREEDY, GREEDY, repeat_count=3)
    made = host.executor._arrays.arrays(plan.rows)
    leases = host.pool.watch([1, 2], [1, 2])
    run = host.decoder.run
    assert run is not None
    for terms in (
        RunTerms(3, host.pool.watch([1], [1]), [(), ()]),
        RunTerms(3, leases, [()]),
        RunTerms(0, leases, [(), ()]),
        RunTerms(3, leases, [(), ()], end=np.zeros(2, np.uint32)),
        RunTerms(3, leases, [(), ()], Heat(np.ones(2, np.float32), np.zeros((2, 2)))),
    ):
        with pytest.raises(ValueError, match="expected"):
            run(made.tokens, made.batch, made.wanted, host.pool.pages, terms)


def test_a_position_without_a_page_is_refused_before_anything_is_written(host: Host) -> None:
    plan = plan_of(host, GREEDY, GREEDY, repeat_count=3)
    made = host.executor._arrays.arrays(plan.rows)
    terms = RunTerms(3, host.pool.watch([1, 2], [1, 2]), [(), ()])
    run = host.decoder.run
    assert run is not None
    kept = host.pool.pages.memory.clone()
    positions = made.batch.row_position.clone()
    # The page after row 0's last would be row 1's first, and that after row 1's is nobody's.
    for row, position in ((0, len(plan.rows[0].page_table) * 16), (0, -1), (1, 500)):
        made.batch.row_position.copy_(positions)
        made.batch.row_position[row] = position
        with pytest.raises(IndexError, match=f"row {row} "):
            run(made.tokens, made.batch, made.wanted, host.pool.pages, terms)
    assert torch.equal(host.pool.pages.memory, kept)


def test_logits_that_are_no_numbers_end_a_run_with_their_row_poisoned(host: Host) -> None:
    for samplings in ((GREEDY, GREEDY), (HOT, HOT), (GREEDY, HOT)):
        plan = plan_of(host, *samplings, repeat_count=20)
        page = int(plan.rows[1].page_table[0])
        host.pool.pages.memory.view(host.pool.page_count, -1)[page].view(torch.float32).fill_(
            float("nan")
        )
        result = host.executor.run_on(plan, Ahead(LONG_US))
        assert [row.poisoned for row in result.rows] == [False, True] and len(result.took_us) == 1


def test_what_draws_more_than_plain_tokens_goes_one_by_one(host: Host) -> None:
    plan = plan_of(host, GREEDY, GREEDY, repeat_count=5)
    assert can_run(plan)
    for other in (
        Sampling(temperature=0.0, max_tokens=64, logprobs=0),
        Sampling(temperature=0.0, max_tokens=64, presence_penalty=0.5),
        Sampling(temperature=0.0, max_tokens=64, min_tokens=3, stop_tokens=[7]),
        Sampling(temperature=0.0, max_tokens=64, logit_bias={3: 1.0}),
    ):
        mixed = plan_of(host, GREEDY, other, repeat_count=5)
        assert not can_run(mixed)
        assert step_count(call(host, mixed)) == 1
        assert all_tokens(ahead(host, mixed)) == all_tokens(one_by_one(host, mixed))
    assert not can_run(replace(plan, repeat_count=0))
    nothing_stops = Sampling(temperature=0.0, max_tokens=64, min_tokens=3)
    assert can_run(plan_of(host, GREEDY, nothing_stops, repeat_count=5))
    assert not can_run(replace(plan, copies=((1, 2),)))
