"""Admissions that are refused, lost and made again: when they are asked for, and what of the work
before them still counts."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tests.unit.engine_worker.bench import Bench, child_of, key, of_kind, result_of, submit

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.plan import StepResult, TokenScores
from pagemesh.wire.messages import Refused
from pagemesh.wire.pager_messages import (
    Admit,
    Commit,
    Extend,
    Fork,
    Forked,
    Heartbeat,
    Revoke,
)
from pagemesh.wire.work_messages import Abort


def preempted(bench: Bench) -> Admit:
    """The one lease is taken away under the running step; what is asked for next."""
    (lease,) = bench.core._desk.leases
    bench.notice(Revoke(key=key(), lease=lease, reason="preempted"))
    bench.step(revoked=True)
    return bench.asked(Admit)


def scored_step(bench: Bench) -> None:
    """A step that reports the log-probabilities of the prompt's tokens that it has seen."""
    plan, bench.plan = bench.plan, None
    assert plan is not None
    result, (row,) = result_of(plan, 51), plan.rows
    count = len(row.tokens) - (row.score_next is None)
    scores = TokenScores(bytes(4 * count), 0, b"", b"") if row.score_from is not None else None
    rows = (replace(result.rows[0], prompt_scores=scores),)
    bench.handle(ev.StepsFinished((StepResult(plan.step, rows),)))


@pytest.mark.parametrize("code", ["Busy", "NoCapacity"])
def test_a_pager_that_says_when_to_come_back_is_left_alone_until_then(code: str) -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.answer(Admit, Refused(code=code, message="full", retry_after_ms=5_000))
    for _ in range(49):
        bench.tick(100)
        assert "Admit" not in bench.open_kinds()
    bench.tick(100)
    assert bench.asked(Admit)


def test_an_admission_after_a_preemption_says_so() -> None:
    bench = Bench().start()
    bench.ask(submit(20))
    assert not bench.asked(Admit).again
    bench.grant()
    assert preempted(bench).again


def test_what_a_preemption_cost_is_counted_and_its_pages_are_not_what_was_cached() -> None:
    bench = Bench().start()
    bench.ask(submit(20, max_tokens=1))
    bench.grant(cached=4)
    bench.step()
    preempted(bench)
    bench.grant(cached=12)
    bench.step(51)
    (ended,) = of_kind(bench.log, ev.Finished)
    facts = ended.facts
    assert (facts.preempted_count, facts.lost_tokens, facts.cached_tokens) == (1, 12, 4)


def test_a_prompt_that_is_scored_from_its_start_again_has_each_score_once() -> None:
    bench = Bench().start()
    bench.ask(submit(20, prompt_logprobs=True))
    bench.grant()
    scored_step(bench)
    preempted(bench)
    bench.grant()
    while not bench.frames:
        scored_step(bench)
    scores = bench.frames[0].prompt_logprobs
    assert scores is not None and len(scores.chosen) == 4 * 19


def test_pages_of_a_prompt_that_has_to_be_computed_are_made_matchable_at_its_end() -> None:
    """What is cached already would be held twice, and taken away for it, without end."""
    for wish in ({"read_cache": False}, {"prompt_logprobs": True}):
        bench = Bench().start()
        bench.ask(msgspec.structs.replace(submit(16), **wish))
        bench.grant()
        scored_step(bench)
        assert "Commit" not in bench.open_kinds()
        scored_step(bench)
        assert bench.asked(Commit).fill.filled_tokens == 16


def test_a_pager_that_lacks_the_tokens_of_a_commit_is_told_them_all() -> None:
    bench = Bench().start()
    bench.ask(submit(24))
    bench.grant()
    bench.step()
    assert bench.asked(Commit).fill.first_token == 8, "it has the prompt from the admission"
    bench.fail(Commit, "Malformed")
    bench.step()
    fill = bench.asked(Commit).fill
    assert (fill.first_token, fill.filled_tokens, len(fill.tokens)) == (0, 16, 4 * 16)


def test_a_lease_that_is_on_its_way_back_is_none_that_a_heartbeat_counts() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    lease = bench.grant(cached=8).lease
    bench.tick(1_000)
    beat = bench.asked(Heartbeat)
    assert (beat.lease_count, beat.lease_digest) == (1, lease)
    bench.fail(Heartbeat, "Busy")
    bench.ask(Abort(request=key().request, attempt=1, reason="client"))
    bench.tick(1_000)
    beat = bench.asked(Heartbeat)
    assert (beat.lease_count, beat.lease_digest) == (0, 0), "the running step still uses it"


def test_who_waits_to_ask_for_pages_again_is_not_patient() -> None:
    bench = Bench().start()
    bench.ask(submit(7, max_tokens=30))
    bench.grant(pages=2)
    bench.step()
    assert bench.core.patience_ms == bench.limits.calm_tick_ms
    bench.fail(Extend, "Busy")
    assert bench.core.patience_ms == bench.limits.tick_ms


def test_pages_that_a_fork_shared_are_told_as_saved() -> None:
    bench = Bench().start()
    bench.ask(submit(8, choices=2, max_tokens=2))
    bench.grant()
    bench.step()
    fork = bench.asked(Fork)
    child = bench.granted(child_of(fork, key(1)), cached=8)
    bench.answer(Fork, Forked(lease=fork.lease, children=[child], copies=[]))
    bench.step()
    ended = of_kind(bench.log, ev.Finished)
    assert {one.key.choice: one.facts.saved_pages for one in ended} == {0: 0, 1: 2}
