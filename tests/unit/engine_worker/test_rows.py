"""More sequences than a step has rows: the order of sequences, and nobody stands still."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import msgspec
import pytest
from tests.unit.engine_worker.bench import DECODE, Bench, of_kind, result_of, submit
from tests.unit.engine_worker.test_batching import (
    NOW_MS,
    batching,
    drawing_wishes,
    numbers,
    wish,
)

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.batching import PASSED_MAX, Batching, Wish, passed_over
from pagemesh.engine.worker.plan import StepRow
from pagemesh.wire.work_messages import Submit

CYCLE = PASSED_MAX + 1


def steps_of(policy: Batching, wishes: list[Wish], count: int) -> list[list[int]]:
    """The numbers of those in each of ``count`` steps, all of whom go on wishing the same."""
    steps = []
    for _ in range(count):
        chosen = policy.choose(wishes, NOW_MS)
        passed = passed_over(wishes, chosen)
        for one in wishes:
            count = one.sequence.passed_count
            one.sequence.passed_count = count + 1 if one.sequence in passed else 0
        steps.append(sorted(numbers(chosen)))
    return steps


def longest_wait(steps: list[list[int]], has_row: Callable[[int], bool]) -> int:
    """The most steps in a row that have nobody who ``has_row``."""
    longest = waited = 0
    for step in steps:
        waited = 0 if any(map(has_row, step)) else waited + 1
        longest = max(longest, waited)
    return longest


# Whose rows ------------------------------------------------------------------------------------


def test_where_all_fit_nobody_is_asked_how_long_they_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Batching, "_fitting", None)
    wishes = drawing_wishes(8)
    wishes[5].sequence.passed_count = 2 * PASSED_MAX
    policy = batching(rows_max=8)
    assert policy.choose(wishes, NOW_MS) == wishes
    beside = [*wishes[:7], wish(99, 40)]
    assert numbers(policy.choose(beside, NOW_MS)) == [*range(1, 8), 99]
    assert not passed_over(wishes, wishes)


def test_who_is_beyond_the_rows_has_a_turn_again_and_again_and_the_first_miss_none() -> None:
    steps = steps_of(batching(rows_max=3), drawing_wishes(4), 10 * CYCLE)
    drawn = Counter(number for step in steps for number in step)
    assert drawn == {1: 10 * CYCLE, 2: 10 * CYCLE, 3: 10 * PASSED_MAX, 4: 10}


def test_however_many_wait_the_first_in_the_order_have_half_of_the_rows() -> None:
    steps = steps_of(batching(rows_max=8), drawing_wishes(100), 500)
    assert all(step[:4] == [1, 2, 3, 4] and len(step) == 8 for step in steps)
    turn = PASSED_MAX + -(-96 // 4)
    for number in range(1, 101):
        assert longest_wait(steps, number.__eq__) <= turn, number


def test_on_one_row_all_have_turns() -> None:
    steps = steps_of(batching(rows_max=1), drawing_wishes(30), 300)
    for number in range(1, 31):
        assert longest_wait(steps, number.__eq__) <= PASSED_MAX + 30, number


def test_a_prompt_has_a_chunk_now_and_then_though_answers_could_fill_all_rows() -> None:
    wishes = [*drawing_wishes(3), wish(98, 4_000), wish(99, 4_000)]
    steps = steps_of(batching(rows_max=3), wishes, 10 * CYCLE)
    of_prompts = [step for step in steps if step[-1] > 3]
    assert len(of_prompts) == 10, "as often as one who draws"
    assert all(step[:2] == [1, 2] for step in steps)


def test_a_prompt_that_is_before_an_answer_in_the_order_has_its_row_at_once() -> None:
    draws, prompt = drawing_wishes(4), wish(99, 40)
    for place in range(5):
        chosen = batching(rows_max=3).choose([*draws[:place], prompt, *draws[place:]], NOW_MS)
        assert numbers(chosen) == ([1, 2, 99] if place < 3 else [1, 2, 3])


def test_a_search_that_is_as_wide_as_a_step_leaves_one_to_prompts_now_and_then() -> None:
    for width in (3, 5):
        search = replace(drawing_wishes(1)[0], row_count=width)
        steps = steps_of(batching(rows_max=3), [search, wish(99, 4_000)], 10 * CYCLE)
        assert Counter(map(tuple, steps)) == {(1,): 10 * PASSED_MAX, (99,): 10}


def test_prompts_that_wait_for_time_and_not_for_rows_are_not_passed_over() -> None:
    wishes = [*drawing_wishes(1), wish(98, 4_000), wish(99, 4_000)]
    chosen = batching(rows_max=8).choose(wishes, NOW_MS)
    assert len(chosen) == 2
    assert not passed_over(wishes, chosen)
    full = batching(rows_max=1).choose(wishes, NOW_MS)
    assert passed_over(wishes, full) == {wishes[1].sequence, wishes[2].sequence}


@pytest.mark.parametrize("seed", range(40))
def test_nobody_waits_longer_than_all_others_have_turns(seed: int) -> None:
    random = Random(seed)
    rows_max = random.randint(1, 12)
    wishes = [
        replace(one, row_count=random.choice((1, 1, 1, random.randint(2, rows_max + 2))))
        for one in drawing_wishes(random.randint(1, 30))
    ]
    for number in range(random.randint(0, 3)):
        wishes.insert(random.randint(0, len(wishes)), wish(100 + number, 4_000))
    steps = steps_of(batching(rows_max=rows_max), wishes, 400)
    rows = {number: one.row_count for number, one in zip(numbers(wishes), wishes, strict=True)}
    for step in steps:
        assert sum(rows[number] for number in step) <= rows_max or len(step) == 1
    turn = PASSED_MAX + len(wishes)
    for number in rows:
        if number < 100:
            assert longest_wait(steps, number.__eq__) <= turn, number
    if max(rows) >= 100:
        assert longest_wait(steps, lambda number: number >= 100) <= turn


# Runs ------------------------------------------------------------------------------------------


def asked(number: int, prompt: int = 4) -> Submit:
    message = submit(prompt, max_tokens=200)
    return msgspec.structs.replace(message, request=f"{number:032x}", arrival_us=number)


def crowded(count: int, *, rows_max: int) -> Bench:
    """The last of ``count`` sequences has just come to draw, in a worker with fewer rows."""
    bench = Bench(DECODE, step_rows_max=rows_max).start()
    for number in range(1, count + 1):
        bench.ask(asked(number))
        bench.grant(pages=60)
        for _ in range(2 * CYCLE):
            if any(int(row.key.request, 16) == number for row in in_plan(bench)):
                break
            bench.step()
        bench.step()
    bench.log.clear()
    return bench


def in_plan(bench: Bench) -> list[StepRow]:
    assert bench.plan is not None
    return list(bench.plan.rows)


def drawing(bench: Bench) -> list[int]:
    return sorted(int(row.key.request, 16) for row in in_plan(bench))


def test_a_run_goes_on_until_it_is_the_turn_of_who_was_passed_over() -> None:
    bench = crowded(3, rows_max=2)
    for _ in range(3):
        assert drawing(bench) == [1, 2]
        assert bench.plan is not None and bench.plan.repeat_count == PASSED_MAX - 1
        bench.run(*range(50, 53))
        assert bench.plan.repeat_count == PASSED_MAX - 4, "it still goes on"
        bench.run(*range(53, 53 + PASSED_MAX - 3))
        assert drawing(bench) == [1, 3]
        assert bench.plan is not None and not bench.plan.repeat_count, "and then by the order"
        bench.step()
    assert not of_kind(bench.log, ev.EndRun)


def test_who_comes_while_a_run_goes_on_waits_as_long_as_others() -> None:
    bench = crowded(2, rows_max=2)
    assert bench.plan is not None and bench.plan.repeat_count == 31
    bench.ask(asked(3))
    bench.grant(pages=60)
    bench.run(*[50] * (PASSED_MAX - 1))
    assert not of_kind(bench.log, ev.EndRun)
    bench.run(50)
    assert len(of_kind(bench.log, ev.EndRun)) == 1
    bench.run(50, goes_on=False)
    assert drawing(bench) == [1, 3]


def test_steps_of_one_call_count_each() -> None:
    bench = crowded(3, rows_max=2)
    plan = bench.plan
    assert plan is not None
    bench.plan = None
    result = result_of(plan, 50)
    rows = tuple(replace(row, before=(50,) * (PASSED_MAX - 1)) for row in result.rows)
    bench.handle(ev.StepsFinished((replace(result, rows=rows, took_us=(1,) * PASSED_MAX),)))
    assert drawing(bench) == [1, 3]


def test_a_prompt_that_waits_for_a_row_has_its_first_token_beside_answers_that_go_on() -> None:
    bench = crowded(2, rows_max=2)
    bench.ask(asked(3, prompt=20))
    bench.grant(pages=60)
    plans = [bench.step() for _ in range(5 * CYCLE)]
    chunks = [row for plan in plans for row in plan.rows if row.key.request == asked(3).request]
    parts = [(row.start, len(row.tokens)) for row in chunks]
    assert parts[:4] == [(0, 8), (8, 8), (16, 4), (20, 1)]
    for number in (1, 2):
        request = asked(number).request
        assert sum(request in {row.key.request for row in plan.rows} for plan in plans) > 30
