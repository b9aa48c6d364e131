"""Runs: steps that follow each other without asking the scheduler."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tests.unit.engine_worker.bench import (
    DECODE,
    PREFILL,
    Bench,
    child_of,
    of_kind,
    result_of,
    submit,
)

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.batching import Batching
from pagemesh.engine.worker.costs import StepCosts, StepShape, drawing
from pagemesh.engine.worker.plan import RowResult, StepPlan, StepResult, plan_after
from pagemesh.engine.worker.settings import RoleSettings
from pagemesh.wire.pager_messages import AckRevoke, Extend, Fork, Forked, Release, Revoke
from pagemesh.wire.tokens import pack
from pagemesh.wire.work_messages import Abort, Submit

OTHER = "f" * 32


def decoding(*, max_tokens: int = 30, pages: int = 8, stop: int | None = None) -> Bench:
    """One sequence with ten prompt tokens that has drawn its first, 51, and decodes."""
    bench = Bench(DECODE).start()
    bench.ask(submit(10, max_tokens=max_tokens, stop=stop))
    bench.grant(cached=8, pages=pages)
    bench.step(51)
    return bench


def other(prompt: int = 3) -> Submit:
    return msgspec.structs.replace(submit(prompt), request=OTHER, prompt=pack(range(prompt)))


def plan_of(bench: Bench) -> StepPlan:
    assert bench.plan is not None
    return bench.plan


def test_a_decoding_sequence_may_run_as_far_as_its_slots_and_its_limit_reach() -> None:
    assert plan_of(decoding(pages=8)).repeat_count == 8 * 4 - 10 - 1
    assert plan_of(decoding(pages=8, max_tokens=6)).repeat_count == 4
    assert plan_of(decoding(pages=40, max_tokens=100)).repeat_count == 31, "run_steps_max"


@pytest.mark.parametrize(
    "asked", [submit(10), submit(4), submit(4, choices=2), submit(4, prompt_logprobs=True)]
)
@pytest.mark.parametrize("role", [PREFILL, DECODE], ids=lambda role: role.role)
def test_prompts_choices_and_scores_are_never_computed_in_a_run(
    role: RoleSettings, asked: Submit
) -> None:
    bench = Bench(role).start()
    bench.ask(asked)
    bench.grant()
    assert plan_of(bench).repeat_count == 0


def test_a_choice_that_computes_its_tail_again_is_not_computed_in_a_run() -> None:
    bench = Bench(DECODE).start()
    bench.ask(submit(10, choices=2, max_tokens=30))
    bench.grant(cached=8)
    bench.step(51)
    fork = bench.asked(Fork)
    child = bench.granted(child_of(fork, fork.children[0]), cached=10, pages=8)
    bench.answer(Fork, Forked(lease=fork.lease, children=[child], copies=[]))
    assert sorted(len(row.tokens) for row in plan_of(bench).rows) == [1, 3]
    assert plan_of(bench).repeat_count == 0


def test_the_next_step_of_a_run_computes_what_the_last_one_drew() -> None:
    bench = decoding()
    first = plan_of(bench)
    bench.run(52)
    row = plan_of(bench).rows[0]
    assert (row.tokens.tolist(), row.start) == ([52], first.rows[0].start + 1)
    assert row.samples[0].tokens.tolist() == [*range(100, 110), 51, 52]
    assert plan_of(bench).repeat_count == first.repeat_count - 1
    assert bench.tokens() == [51, 52]
    bench.run(53)
    (sample,) = plan_of(bench).rows[0].samples
    assert sample.tokens.tolist() == [*range(100, 110), 51, 52, 53] and sample.generated_count == 3


def test_several_steps_of_a_run_make_one_frame_and_fill_one_slot_each() -> None:
    bench = decoding(max_tokens=5)
    sent = len(bench.sent)
    bench.run(52, 53)
    assert [len(message.frames.frames) for message in bench.sent[sent:]] == [1]
    bench.run(54, 55, goes_on=False)
    assert bench.tokens() == [51, 52, 53, 54, 55] and bench.frames[-1].finish == "length"
    assert bench.asked(Release).fill.filled_tokens == 10 + 4, "nothing was written for the last"


def test_a_run_asks_for_pages_ahead_of_its_need() -> None:
    bench = decoding(pages=5)
    bench.run(52, 53, 54, 55, 56, 57)
    assert bench.asked(Extend).have_pages == 5


def test_a_run_ends_after_a_stop_token() -> None:
    bench = decoding(stop=9)
    bench.run(52, 9)
    assert bench.tokens() == [51, 52, 9] and bench.frames[-1].finish == "stop"


def test_somebody_who_wants_to_compute_ends_a_run_once() -> None:
    bench = decoding()
    bench.ask(other())
    assert not of_kind(bench.log, ev.EndRun), "it has no pages yet"
    bench.grant()
    assert len(of_kind(bench.log, ev.EndRun)) == 1
    bench.tick()
    assert len(of_kind(bench.log, ev.EndRun)) == 1
    bench.run(52, goes_on=False)
    assert {row.key.request for row in plan_of(bench).rows} == {submit().request, OTHER}


def test_nothing_is_chosen_anew_while_all_who_have_pages_are_in_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = decoding(pages=5)
    bench.run(52, 53, 54, 55, 56, 57)
    with monkeypatch.context() as patched:
        patched.setattr(Batching, "choose", None)  # every event would ask it
        bench.tick()
        bench.ask(other())
    bench.grant()
    assert len(of_kind(bench.log, ev.EndRun)) == 1


def test_who_waits_for_room_in_a_full_step_does_not_end_runs() -> None:
    bench = Bench(DECODE, step_rows_max=1).start()
    bench.ask(submit(10, max_tokens=30))
    bench.grant(cached=8, pages=8)
    bench.step(51)
    bench.ask(other())
    bench.grant()
    assert not of_kind(bench.log, ev.EndRun)


def test_an_aborted_run_is_ended_and_its_lease_given_back_only_after_it() -> None:
    bench = decoding()
    bench.ask(Abort(request=submit().request, attempt=1, reason="client"))
    assert len(of_kind(bench.log, ev.EndRun)) == 1
    assert "Release" not in bench.open_kinds()
    bench.run(52)
    assert "Release" not in bench.open_kinds(), "its next step still writes"
    bench.run(53, goes_on=False)
    fill = bench.asked(Release).fill
    assert fill.filled_tokens == 11, "tokens that nobody took are not told"


def test_what_an_aborted_sequence_drew_is_not_taken_for_the_cost_of_a_prompt() -> None:
    bench = decoding()
    plan = plan_of(bench)
    bench.ask(Abort(request=submit().request, attempt=1, reason="client"))
    bench.handle(ev.StepsFinished((replace(result_of(plan, 52), took_us=(5_000,)),)))
    costs = bench.core._batching.costs
    assert costs.us(drawing([10])) > 0.0
    assert not costs.knows_prompts


def test_a_result_of_several_steps_tells_what_one_takes() -> None:
    bench = decoding()
    plan = plan_of(bench)
    bench.plan = None
    rows = (replace(result_of(plan, 55).rows[0], before=(52, 53, 54)),)
    bench.handle(ev.StepsFinished((StepResult(plan.step, rows, (5_000, 7_000, 3_000, 5_000)),)))
    assert bench.core._batching.costs.us(drawing([11])) == pytest.approx(5_000, rel=0.01)


def test_a_revoked_run_is_ended_and_acknowledged_only_after_it() -> None:
    bench = decoding()
    lease = plan_of(bench).rows[0].lease
    bench.notice(Revoke(lease=lease, key=plan_of(bench).rows[0].key, reason="preempted"))
    assert len(of_kind(bench.log, ev.EndRun)) == 1
    bench.run(52)
    assert "AckRevoke" not in bench.open_kinds()
    bench.run(53, goes_on=False)
    assert bench.asked(AckRevoke).leases == [lease]
    assert bench.tokens() == [51], "what was drawn under a lost lease is drawn again"


def test_a_run_in_which_a_lease_was_found_revoked_counts_for_nothing() -> None:
    bench = decoding()
    plan = plan_of(bench)
    row = plan.rows[0]
    bench.plan = None
    stopped = StepResult(plan.step, (RowResult(row.key, row.lease, revoked=True),))
    assert plan_after(plan, stopped) is None
    bench.handle(ev.StepsFinished((stopped,)))
    assert bench.tokens() == [51]
    assert bench.asked(AckRevoke).leases == [row.lease]


@pytest.mark.parametrize("length", [1, 3])
def test_results_of_another_plan_are_not_listened_to(length: int) -> None:
    bench = decoding()
    plan = plan_of(bench)
    stale = tuple(StepResult(plan.step - 1, ()) for _ in range(length))
    bench.handle(ev.StepsFinished(stale))
    assert bench.tokens() == [51] and bench.plan is plan


def test_a_result_of_several_steps_counts_as_steps_in_the_middle_of_them() -> None:
    class Seen(StepCosts):
        def observe(self, shape: StepShape, duration_us: float) -> None:
            seen.append((shape, duration_us))

    seen: list[tuple[StepShape, float]] = []
    bench = decoding()
    bench.core._batching.costs = Seen()
    rows = (replace(result_of(plan_of(bench), 55).rows[0], before=(52, 53, 54)),)
    result = StepResult(plan_of(bench).step, rows, (5_000, 7_000, 3_000, 5_000))
    bench.plan = None
    bench.handle(ev.StepsFinished((result,)))
    assert seen == [(drawing([11]), 5_000)]
