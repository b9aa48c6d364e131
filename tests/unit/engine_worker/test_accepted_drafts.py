"""Several tokens of one result: of steps of one call, or drafts that were right and the token after
them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.engine_worker.bench import Bench, of_kind, result_of
from tests.unit.engine_worker.test_runs import decoding, plan_of

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker import measures
from pagemesh.engine.worker.plan import StepResult, plan_after, revoked_row
from pagemesh.runtime.metrics import REGISTRY
from pagemesh.wire.pager_messages import Commit, Extend, Release
from pagemesh.wire.work_messages import Abort


def drew(bench: Bench, *tokens: int, poisoned: bool = False) -> StepResult:
    """The running step drew ``tokens``, the last of them after drafts that were right."""
    plan = plan_of(bench)
    key = plan.rows[0].key
    result = result_of(plan, tokens[-1], spoiled=key if poisoned else None)
    row = replace(result.rows[0], before=tokens[:-1], drafted_count=len(tokens))
    return replace(result, rows=(row,))


def report(bench: Bench, *results: StepResult, goes_on: bool = True) -> None:
    bench.plan = plan_after(plan_of(bench), results[-1]) if goes_on else None
    bench.handle(ev.StepsFinished(results, bench.plan is not None))


def test_what_a_step_drew_is_told_in_order_and_its_slots_are_filled() -> None:
    bench = decoding()
    first = plan_of(bench)
    report(bench, drew(bench, 52, 53, 54))
    assert bench.tokens() == [51, 52, 53, 54]
    row = plan_of(bench).rows[0]
    assert (row.tokens.tolist(), row.start) == ([54], first.rows[0].start + 3)
    (sample,) = row.samples
    assert sample.tokens.tolist() == [*range(100, 110), 51, 52, 53, 54]
    assert sample.generated_count == 4
    assert plan_of(bench).repeat_count == first.repeat_count - 3
    report(bench, drew(bench, 55, 56), goes_on=False)
    assert bench.tokens() == [51, 52, 53, 54, 55, 56]
    assert plan_of(bench).rows[0].start == first.rows[0].start + 5, "a new plan"


def test_a_run_ends_where_drafts_used_up_what_may_be_drawn() -> None:
    bench = decoding(max_tokens=5)
    assert plan_of(bench).repeat_count == 3
    report(bench, drew(bench, 52, 53, 54, 55))
    assert bench.plan is None and bench.tokens() == [51, 52, 53, 54, 55]
    assert bench.frames[-1].finish == "length"
    assert bench.asked(Release).fill.filled_tokens == 10 + 4, "nothing was written for the last"


def test_what_drafts_computed_is_told_at_the_end() -> None:
    bench = decoding(max_tokens=5)
    report(bench, drew(bench, 52, 53, 54, 55))
    (ended,) = of_kind(bench.log, ev.Finished)
    assert (ended.facts.computed_tokens, ended.facts.generated_tokens) == (2 + 4, 5)


def test_a_stop_after_drafts_ends_the_answer() -> None:
    bench = decoding(stop=9)
    report(bench, drew(bench, 52, 53, 9))
    assert bench.tokens() == [51, 52, 53, 9] and bench.frames[-1].finish == "stop"


def test_pages_that_drafts_filled_are_committed() -> None:
    bench = decoding(pages=8)
    report(bench, drew(bench, *range(52, 60)))
    assert bench.asked(Commit).fill.filled_tokens == 10 + 8


def test_what_drafts_will_need_is_asked_for_ahead() -> None:
    bench = decoding(pages=5)
    report(bench, drew(bench, *range(52, 58)))
    assert bench.asked(Extend).have_pages == 5


def test_drafts_before_a_row_of_no_numbers_are_told_and_nothing_after_them() -> None:
    bench = decoding()
    before = drew(bench, 52)
    following = plan_after(plan_of(bench), before)
    assert following is not None
    spoiled = result_of(following, 0, spoiled=following.rows[0].key)
    spoiled = replace(spoiled, rows=(replace(spoiled.rows[0], before=(53, 54)),))
    assert plan_after(following, spoiled) is None
    bench.plan = None
    bench.handle(ev.StepsFinished((before, spoiled), False))
    assert bench.tokens() == [51, 52, 53, 54]
    error = bench.frames[-1].error
    assert error is not None and error.code == "Internal"


def test_drafts_of_the_step_that_spoils_a_row_are_told_as_those_of_steps_before_are() -> None:
    bench = decoding()
    report(bench, drew(bench, 52, 53, 0, poisoned=True), goes_on=False)
    assert bench.tokens() == [51, 52, 53]
    error = bench.frames[-1].error
    assert error is not None and error.code == "Internal"


NAMES = (
    "drafted_tokens_total", "accepted_drafts_total", "computed_tokens_total",
    "step_seconds_count", "step_seconds_sum", "step_rows_count",
)  # fmt: skip


def counts(*names: str) -> list[float]:
    values = (REGISTRY.get_sample_value(f"pagemesh_{name}") for name in names or NAMES)
    return [value or 0.0 for value in values]


def test_metrics_leave_out_rows_and_steps_that_were_not_computed() -> None:
    names = ("computed_tokens_total", "step_seconds_count", "step_rows_sum", "revoked_rows_total")
    plan = plan_of(decoding())
    gone, row = revoked_row(plan.rows[0]), result_of(plan, 52).rows[0]
    two = replace(plan, rows=2 * plan.rows)
    for rows, expected in ((gone, gone), [0, 0, 0, 2]), ((gone, row), [1, 1, 1, 1]):
        before = counts(*names)
        measures.steps_ended([(two, StepResult(plan.step, rows))])
        assert [now - then for now, then in zip(counts(*names), before, strict=True)] == expected


def test_metrics_count_what_was_drafted_and_what_of_it_was_right() -> None:
    bench = decoding()
    plan, result = plan_of(bench), drew(bench, 52, 53, 54)
    rows = (replace(result.rows[0], drafted_count=5),)
    for took_us, accepted in ((1_000,), 2), ((1_000, 2_000), 1):
        before = counts()
        measures.steps_ended([(plan, StepResult(plan.step, rows, took_us))])
        grown = [now - then for now, then in zip(counts(), before, strict=True)]
        seconds = sum(took_us) / 1e6
        assert grown == pytest.approx([5, accepted, 3, len(took_us), seconds, len(took_us)])


@pytest.mark.parametrize("drawn", [(52,), (52, 53, 54)])
def test_what_was_drawn_after_the_end_fills_nothing(drawn: tuple[int, ...]) -> None:
    bench = decoding()
    key = plan_of(bench).rows[0].key
    bench.ask(Abort(request=key.request, attempt=key.attempt, reason="client"))
    report(bench, drew(bench, *drawn), goes_on=False)
    assert bench.asked(Release).fill.filled_tokens == 11
