"""A sequence whose grammar allows no further token ends with the reason, and no other does."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.engine_worker.bench import Bench, key, result_of, submit
from tests.unit.engine_worker.test_poison import OTHER, _ends, _finish, _two_decoding

from pagemesh.engine.worker.plan import StepPlan, StepResult, plan_after
from pagemesh.wire.messages import SequenceKey
from pagemesh.wire.pager_messages import Release

WHY = "no token of this model's vocabulary can continue the answer"


def refused(plan: StepPlan, token: int, *keys: SequenceKey) -> StepResult:
    """A result in which the samples of ``keys`` are refused; the others draw ``token``."""
    result = result_of(plan, token)
    rows = tuple(
        replace(row, drawn=tuple(
            replace(one, refusal=WHY if one.key in keys else "") for one in row.drawn
        ))
        for row in result.rows
    )  # fmt: skip
    return replace(result, rows=rows)


def test_a_refused_row_ends_its_sequence_with_its_reason_and_the_others_go_on() -> None:
    bench = _two_decoding()
    assert bench.plan is not None and len(bench.plan.rows) == 2
    _finish(bench, refused(bench.plan, 51, OTHER))
    assert _ends(bench, OTHER.request) == [("error", "GrammarRefused")]
    [error] = [frame.error for frame in bench.frames if frame.error is not None]
    assert error.message == WHY
    assert bench.plan is not None and [row.key for row in bench.plan.rows] == [key()]
    assert bench.tokens()[-1] == 51
    assert bench.asked(Release).cache, "its pages are as good as any"


def test_tokens_drawn_before_a_run_was_refused_are_delivered() -> None:
    bench = _two_decoding()
    plan = bench.plan
    assert plan is not None and plan.repeat_count
    sound = result_of(plan, 52)
    following = plan_after(plan, sound)
    assert following is not None
    over = refused(following, 53, key())
    assert plan_after(following, over) is None, "the scheduler has to decide"
    _finish(bench, sound, over)
    assert bench.tokens()[-1] == 52
    assert _ends(bench, key().request) == [("error", "GrammarRefused")]


def test_of_choices_that_fork_each_is_refused_by_itself() -> None:
    bench = Bench().start()
    bench.ask(submit(7, max_tokens=40, choices=3))
    bench.grant(pages=8)
    assert bench.plan is not None
    _finish(bench, refused(bench.plan, 60, key(), key(2)))
    ends = {frame.key.choice: frame.error for frame in bench.frames if frame.error is not None}
    assert set(ends) == {0, 2} and all(error.code == "GrammarRefused" for error in ends.values())
    living = [frame.key.choice for frame in bench.frames if frame.tokens]
    assert set(living) == {1}
