"""What a step computes, by what steps cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.engine_worker.bench import ROOT
from tests.unit.engine_worker.test_costs import CONTEXT_TOKENS, draws, learnt, true_us

from pagemesh.engine.worker.batching import (
    ALONE_US_MIN,
    CHUNK_TOKENS_ALONE_MIN,
    CHUNK_TOKENS_MIN,
    IDLE_US_MIN,
    PASSED_MAX,
    PROMPT_WEIGHT,
    PROMPTS_RATIO_MAX,
    PROMPTS_RATIO_MIN,
    REST_SHARE,
    UNKNOWN_TOKENS_MAX,
    Batching,
    Wish,
)
from pagemesh.engine.worker.costs import StepCosts, StepShape, drawing, prompt
from pagemesh.engine.worker.desk import Row
from pagemesh.engine.worker.lease import Lease, TokenBuffer
from pagemesh.engine.worker.plan import Readers, RowResult, StepResult
from pagemesh.engine.worker.sequence import Owner, Phase, Sequence
from pagemesh.wire.messages import LEVEL_US, Order, SequenceKey
from pagemesh.wire.work_messages import Sampling

NOW_MS = 1_000_000.0


def wish(
    number: int,
    count: int = 1,
    *,
    filled: int = 0,
    phase: Phase = Phase.PREFILL,
    submitted_ms: float = 0.0,
    priority: int = 0,
) -> Wish:
    request = f"{number:032x}"
    key = SequenceKey(request=request, attempt=1, choice=0)
    order = Order(priority=priority, arrival_us=number, request=request, choice=0)
    tokens = TokenBuffer(np.zeros(filled + count, np.uint32), filled + count)
    sequence = Sequence(
        key=key, order=order, owner=Owner("gw", 1), root=ROOT, sampling=Sampling(max_tokens=9),
        tokens=tokens, prompt_count=filled + count, start_count=0, deadline_ms=1e9, decode=None,
        read_cache=True, submitted_ms=submitted_ms, phase=phase,
    )  # fmt: skip
    return Wish(sequence, filled, count)


def drawing_wishes(count: int) -> list[Wish]:
    return [wish(number + 1, filled=CONTEXT_TOKENS, phase=Phase.DECODE) for number in range(count)]


def row_of(wish: Wish) -> Row:
    """``wish`` as part of a step."""
    own = wish.sequence
    lease = Lease.of(
        lease=1, slot=1, granted_at=1, key=own.key, order=own.order, root=own.root,
        tokens=own.tokens, page_size=16, pages=np.arange(300, dtype=np.uint32), filled=wish.start,
        known=0,
    )  # fmt: skip
    return Row(own, lease, wish.count, wish.draws, ())


def batching(costs: StepCosts | None = None, **changes: int) -> Batching:
    limits = {"step_tokens_max": 512, "chunk_tokens_max": 512, "rows_max": 64, **changes}
    return Batching(**limits, costs=costs or StepCosts())


def shape_of(wishes: list[Wish]) -> StepShape:
    shape = drawing([one.start for one in wishes if one.draws])
    for one in wishes:
        shape += StepShape() if one.draws else prompt(one.start, one.count)
    return shape


def numbers(wishes: list[Wish]) -> list[int]:
    return [int(one.sequence.key.request, 16) for one in wishes]


# How many tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "waiting", "ratio"),
    [
        (1, 1, PROMPT_WEIGHT),
        (2, 3, PROMPT_WEIGHT * 3 / 2),
        (8, 40, PROMPTS_RATIO_MAX),
        (4, 1, PROMPTS_RATIO_MIN),
        (16, 1, PROMPTS_RATIO_MIN),
    ],
)
def test_beside_readers_prompts_have_several_times_what_a_step_takes_without_them(
    rows: int, waiting: int, ratio: float
) -> None:
    """The more, the more wait and the fewer read, within limits."""
    prompts = [wish(100 + number, 4_000) for number in range(waiting)]
    chosen = batching(learnt(), step_tokens_max=4_000, chunk_tokens_max=4_000).choose(
        [*drawing_wishes(rows), *prompts], NOW_MS
    )
    assert len(chosen) > rows
    times = true_us(shape_of(chosen)) / true_us(draws(rows))
    assert 0.85 * (1 + ratio) < times <= 1.05 * (1 + ratio)


def test_those_who_read_from_other_workers_count_as_those_who_read_from_this_one() -> None:
    one, other = batching(learnt()), batching(learnt())
    other.readers = Readers(rows=1, step_us=int(true_us(draws(1))))
    own = one.choose([*drawing_wishes(1), wish(99, 4_000)], NOW_MS)[-1]
    alone = other.choose([wish(99, 4_000)], NOW_MS)[-1]
    assert CHUNK_TOKENS_ALONE_MIN < alone.count < 512
    assert alone.count == pytest.approx(own.count, abs=16)


def test_a_step_of_prompts_alone_is_long_enough_to_be_worth_the_weights_it_reads() -> None:
    quick = batching(learnt(), itl_target_ms=1)
    quick.readers = Readers(rows=64, step_us=100)
    chosen = quick.choose([wish(98, 4_000), wish(99, 4_000)], NOW_MS)
    assert [one.count for one in chosen] == [CHUNK_TOKENS_ALONE_MIN]
    assert [one.count for one in quick.choose([wish(98, 40)], NOW_MS)] == [40]


def test_a_step_of_prompts_alone_takes_at_least_what_no_reader_notices() -> None:
    costs = StepCosts()
    for count in range(1, 100):
        costs.observe(prompt(0, count), 1_000 + 100 * count)
    quick = batching(costs)
    quick.readers = Readers(rows=64, step_us=100)
    (chosen,) = quick.choose([wish(98, 400)], NOW_MS)
    assert chosen.count == pytest.approx(ALONE_US_MIN / 100, rel=0.1)


def test_before_it_is_known_what_prompts_cost_they_get_little_beside_readers_elsewhere() -> None:
    unknown = batching()
    unknown.readers = Readers(rows=1, step_us=5_000)
    assert [one.count for one in unknown.choose([wish(99, 4_000)], NOW_MS)] == [UNKNOWN_TOKENS_MAX]


def test_a_target_in_milliseconds_is_kept_to() -> None:
    chosen = batching(learnt(), itl_target_ms=60).choose(
        [*drawing_wishes(4), wish(99, 4_000)], NOW_MS
    )
    assert 50_000 < true_us(shape_of(chosen)) <= 61_000


def test_where_a_target_cannot_be_kept_prompts_still_come_to_their_end() -> None:
    chosen = batching(learnt(), itl_target_ms=1).choose(
        [*drawing_wishes(4), wish(99, 4_000), wish(100, 4_000)], NOW_MS
    )
    assert [one.count for one in chosen] == [1, 1, 1, 1, CHUNK_TOKENS_MIN]


def test_a_prompt_that_nobody_waits_beside_has_the_whole_step() -> None:
    assert [one.count for one in batching(learnt()).choose([wish(1, 4_000)], NOW_MS)] == [512]


def test_before_it_is_known_what_prompts_cost_they_get_little_beside_others() -> None:
    for costs in (StepCosts(), learnt(prompts=False)):
        chosen = batching(costs).choose([*drawing_wishes(1), wish(99, 4_000)], NOW_MS)
        assert [one.count for one in chosen] == [1, UNKNOWN_TOKENS_MAX]


def test_steps_that_are_shorter_than_reports_leave_prompts_the_time_of_reports() -> None:
    costs = StepCosts()
    for count in range(1, 100):
        costs.observe(drawing([10]), 1_000)
        costs.observe(drawing([10]) + prompt(0, count), 1_000 + 100 * count)
    for stream_ms, time_us in ((0, IDLE_US_MIN), (2, IDLE_US_MIN), (10, 10_000)):
        policy = batching(costs, stream_ms=stream_ms)
        chosen = policy.choose([wish(1, filled=10, phase=Phase.DECODE), wish(99, 4_000)], NOW_MS)
        assert chosen[-1].count == pytest.approx(PROMPT_WEIGHT * time_us / 100, abs=10)
        many = [wish(1 + number, filled=10, phase=Phase.DECODE) for number in range(8)]
        chosen = policy.choose([*many, wish(99, 4_000)], NOW_MS)
        assert chosen[-1].count == pytest.approx(PROMPTS_RATIO_MIN * time_us / 100, abs=10)


def test_later_chunks_of_a_prompt_are_shorter_since_they_attend_to_more() -> None:
    costs = learnt()
    early = batching(costs).choose([*drawing_wishes(4), wish(99, 4_000)], NOW_MS)
    late = batching(costs).choose([*drawing_wishes(4), wish(99, 4_000, filled=8_000)], NOW_MS)
    assert late[-1].count < early[-1].count


@pytest.mark.parametrize("readers", [0, 3, 40])
def test_who_reads_takes_nothing_from_a_prompt_that_fills_a_step(readers: int) -> None:
    wishes = [*drawing_wishes(readers), *(wish(100 + number, 512) for number in range(20))]
    cheap = batching(StepCosts(), stream_ms=1_000_000)
    cheap.costs.observe(prompt(0, 8), 1.0)
    assert cheap.choose(wishes, NOW_MS)[readers:] == wishes[readers : readers + 1]


def test_a_little_rest_is_computed_with_the_chunk_before_it() -> None:
    def counts(*wished: int) -> list[int]:
        wishes = [wish(number, count) for number, count in enumerate(wished)]
        return [one.count for one in batching(learnt()).choose(wishes, NOW_MS)]

    assert [counts(count) for count in (512, 576, 577)] == [[512], [576], [512]]
    assert counts(70, 70, 418) == [70, 70, 418]
    assert counts(70, 70, 419) == [70, 70, 372]
    assert counts(512, 512) == [512]


def test_with_a_target_no_rest_goes_beyond_it() -> None:
    wishes = [*drawing_wishes(2), wish(1, 64)]
    chunk = batching(learnt(), itl_target_ms=52).choose(wishes, NOW_MS)[-1].count
    assert 64 * REST_SHARE // (REST_SHARE + 1) <= chunk < 64
    assert batching(learnt(), itl_target_ms=60).choose(wishes, NOW_MS)[-1].count == 64


def test_with_a_target_not_even_a_little_rest_goes_beyond_it() -> None:
    wishes = [*drawing_wishes(2), wish(1, 128)]
    counts = {
        batching(learnt(), itl_target_ms=ms).choose(wishes, NOW_MS)[-1].count
        for ms in range(40, 200)
    }
    assert 128 in counts
    assert any(0 < (128 - count) * REST_SHARE <= count for count in counts)


def test_more_may_draw_than_a_step_computes_of_prompts() -> None:
    readers = drawing_wishes(40)
    assert batching(learnt(), step_tokens_max=16).choose(readers, NOW_MS) == readers


def test_rows_and_tokens_of_a_step_are_bounded() -> None:
    many = [*drawing_wishes(10), *(wish(100 + number, 30) for number in range(10))]
    for rows_max, tokens_max in ((64, 64), (12, 512), (10, 512), (4, 512), (64, 5)):
        chosen = batching(learnt(), rows_max=rows_max, step_tokens_max=tokens_max).choose(
            many, NOW_MS
        )
        prompts = sum(one.count for one in chosen if not one.draws)
        assert len(chosen) <= rows_max and prompts <= tokens_max + tokens_max // REST_SHARE
        assert all(one.count >= 1 for one in chosen)
        assert numbers(chosen)[:4] == [1, 2, 3, 4]


def test_beside_a_search_prompts_get_the_rows_that_its_beams_do_not_take() -> None:
    search = replace(drawing_wishes(1)[0], row_count=6)
    prompts = [wish(100 + number, 1) for number in range(5)]
    chosen = batching(learnt(), rows_max=8).choose([search, *prompts], NOW_MS)
    assert chosen[0] is search
    assert sum(one.row_count for one in chosen) == 8


def test_beside_a_search_that_does_not_fit_those_behind_it_go_on_until_it_has_a_turn() -> None:
    search, *others = drawing_wishes(9)
    wishes = [*others[:4], replace(search, row_count=6), *others[4:]]
    policy = batching(learnt(), rows_max=8)
    assert policy.choose(wishes, NOW_MS) == others
    search.sequence.passed_count = PASSED_MAX
    assert policy.choose(wishes, NOW_MS) == [wishes[4], *others[:2]]


# Whose turn ------------------------------------------------------------------------------------


def test_of_those_that_came_together_who_needs_least_goes_first() -> None:
    long, short = wish(1, 3_000), wish(2, 60)
    cached = wish(3, 40, filled=2_960)
    chosen = batching(learnt()).choose([long, short, cached], NOW_MS)
    assert numbers(chosen) == [3, 2, 1]


def test_a_prompt_that_came_later_goes_first_once_it_waited_more_times_its_own_length() -> None:
    costs = learnt()
    long_ms, short_ms = costs.prompt_us(0, 3_000) / 1_000, costs.prompt_us(0, 60) / 1_000
    long = wish(1, 3_000, submitted_ms=NOW_MS - 2 * long_ms)
    for waits, first in ((1.9, 1), (2.1, 2)):
        short = wish(2, 60, submitted_ms=NOW_MS - waits * short_ms)
        assert numbers(batching(costs).choose([long, short], NOW_MS))[0] == first


def test_nobody_starves_while_shorter_prompts_keep_coming() -> None:
    costs, policy = learnt(), batching(learnt(), chunk_tokens_max=128, step_tokens_max=128)
    now_ms, computed, steps = 0.0, 0, 0
    shorts: list[Wish] = []
    while computed < 2_000:
        steps += 1
        # As many tokens come as a step has room for: somebody must wait.
        shorts.append(wish(1 + steps, 128, submitted_ms=now_ms))
        rest = wish(1, 2_000 - computed, filled=computed)
        for one in policy.choose([rest, *shorts], now_ms):
            now_ms += costs.prompt_us(one.start, one.count) / 1_000
            if one.sequence.order.arrival_us == 1:
                computed += one.count
            shorts = [short for short in shorts if short.sequence is not one.sequence]
        assert steps < 400, "it starves"
    assert steps > 2_000 // 128 + 4, "it did let others by"


def test_a_long_prompt_that_has_few_pages_as_yet_is_as_long_as_it_is() -> None:
    long = replace(wish(1, 512), left_count=8_000)
    assert numbers(batching(learnt()).choose([long, wish(2, 600)], NOW_MS))[0] == 2


def waited(number: int, count: int, waited_us: int, priority: int) -> Wish:
    return wish(number, count, submitted_ms=NOW_MS - waited_us / 1_000, priority=priority)


def test_priority_goes_before_length_and_age_until_a_level_was_waited_for_each() -> None:
    urgent = waited(2, 3_000, 0, -1)
    for waited_us, first in ((2 * LEVEL_US - 1, 2), (3 * LEVEL_US, 1)):
        old = waited(1, 30, waited_us, 1)
        assert numbers(batching(learnt()).choose([old, urgent], NOW_MS))[0] == first


def test_among_prompts_of_one_priority_short_ones_go_first_however_long_all_have_waited() -> None:
    old, short = waited(1, 3_000, 5 * LEVEL_US, 1), waited(2, 30, LEVEL_US, 1)
    assert numbers(batching(learnt()).choose([old, short], NOW_MS))[0] == 2


def test_before_anything_is_measured_shorter_prompts_go_first_too() -> None:
    first, second = wish(1, 3_000), wish(2, 30)
    assert numbers(batching().choose([first, second], NOW_MS)) == [2, 1]


def test_many_who_come_after_a_few_short_steps_do_not_have_smaller_and_smaller_chunks() -> None:
    """Prompts are computed beside ever more rows, and no step is without them meanwhile: what the
    rows cost must not be taken for what prompts do."""

    def truth_us(shape: StepShape) -> float:
        drawn_us = 20.0 * shape.drawing_rows + 1.1 * shape.read_slots
        return 2_000.0 + drawn_us + 60.0 * shape.prompt_tokens

    costs = StepCosts()
    for start in range(32, 40):
        costs.observe(drawing([start]), truth_us(drawing([start])))
    step_count = 0
    for rows in range(32):
        left = 512
        while left:
            beside = drawing([550] * rows)
            room = 64
            if costs.knows_prompts:
                room = max(costs.tokens_within(max(costs.us(beside), 5_000.0), 0), 16)
            count = min(left, room)
            shape = beside + prompt(512 - left, count)
            costs.observe(shape, truth_us(shape))
            left -= count
            step_count += 1
    assert costs.us(drawing([550] * 32)) == pytest.approx(truth_us(drawing([550] * 32)), rel=0.3)
    assert costs.prompt_us(0, 512) == pytest.approx(512 * 60.0, rel=0.3)
    assert step_count < 32 * 8


def test_readers_of_other_workers_count_beside_those_of_this_one() -> None:
    """The more read in all, the less of a step is for prompts."""
    found = []
    for rows in (0, 2):
        one = batching(learnt(), step_tokens_max=4_000, chunk_tokens_max=4_000)
        one.readers = Readers(rows=rows)
        prompts = [wish(100 + number, 4_000) for number in range(3)]
        chosen = one.choose([*drawing_wishes(2), *prompts], NOW_MS)
        found.append(sum(wish.count for wish in chosen if not wish.draws))
    assert found[0] > 1.5 * found[1] > 0


@pytest.mark.parametrize("wished", [wish(50, 512), wish(51, filled=512, phase=Phase.DECODE)])
def test_of_a_step_that_computed_nothing_since_its_lease_had_ended_nothing_is_learnt(
    wished: Wish,
) -> None:
    batch = batching(learnt(), step_tokens_max=4_000, chunk_tokens_max=4_000)

    def chunk() -> int:
        return batch.choose([*drawing_wishes(4), wish(99, 4_000)], NOW_MS)[-1].count

    before = chunk()
    revoked = RowResult(wished.sequence.key, 1, revoked=True)
    batch.note((row_of(wished),), [StepResult(1, (revoked,), (70,))])
    batch.learn()
    assert chunk() == before
