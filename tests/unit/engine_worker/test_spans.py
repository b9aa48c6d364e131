"""What the spans of sequences say of their steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.engine_worker.bench import Bench, result_of
from tests.unit.engine_worker.test_accepted_drafts import drew
from tests.unit.engine_worker.test_runs import decoding, plan_of

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker import spans
from pagemesh.engine.worker.plan import StepPlan, StepResult, plan_after
from pagemesh.engine.worker.spans import SequenceSpans
from pagemesh.runtime import semconv
from pagemesh.runtime.trace import TraceContext

FACTS = ev.SequenceFacts(10, 5, 8, 6, 0, 0, 0, "length", "")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Name to what was said of the last span of that name."""
    found: dict[str, dict[str, Any]] = {}

    def record(name: str, context: TraceContext, **said: Any) -> None:
        found[name] = said

    monkeypatch.setattr(spans, "record_span", record)
    return found


def watched(bench: Bench) -> SequenceSpans:
    made = SequenceSpans("decode", "d", life_count_max=10)
    made.begin([plan_of(bench).rows[0].key], TraceContext(1, 2, 0, sampled=True), 0)
    made.step_began(plan_of(bench), 5)
    return made


def steps_of(bench: Bench, *tokens: tuple[int, ...]) -> list[tuple[StepPlan, StepResult]]:
    steps = []
    for own in tokens:
        plan = plan_of(bench)
        steps.append((plan, drew(bench, *own)))
        bench.plan = plan_after(*steps[-1])
    return steps


def test_a_decode_span_counts_what_was_drawn_and_drafted_and_right(
    recorded: dict[str, dict[str, Any]],
) -> None:
    bench = decoding()
    key, made = plan_of(bench).rows[0].key, watched(bench)
    made.steps_ended(steps_of(bench, (52,), (53, 54, 55, 56), (57, 58)), 10)
    made.end(key, FACTS, 20)
    said = recorded["decode"]["attributes"]
    assert said[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] == 1 + 4 + 2
    assert said[semconv.PAGEMESH_TOKENS_DRAFTED] == 1 + 4 + 2
    assert said[semconv.PAGEMESH_TOKENS_ACCEPTED] == 0 + 3 + 1


def test_events_come_every_so_many_tokens_whatever_a_step_draws(
    recorded: dict[str, dict[str, Any]],
) -> None:
    bench = decoding(max_tokens=90, pages=40)
    key, made = plan_of(bench).rows[0].key, watched(bench)
    made.steps_ended(steps_of(bench, *[tuple(range(60, 65))] * 6), 10)
    made.steps_ended([(plan_of(bench), drew(bench, 7, 8, 9))], 30)
    made.end(key, FACTS, 40)
    noted = [(event.name, event.attributes.get("count")) for event in recorded["decode"]["events"]]
    assert noted == [("first token", None), ("tokens", 33)]


def test_what_was_revoked_counts_for_nothing(recorded: dict[str, dict[str, Any]]) -> None:
    bench = decoding()
    plan, made = plan_of(bench), watched(bench)
    row = replace(result_of(plan, 52).rows[0], revoked=True, drawn=(), drafted_count=4)
    made.steps_ended([(plan, StepResult(plan.step, (row,)))], 10)
    made.end(plan.rows[0].key, FACTS, 20)
    said = recorded["decode"]["attributes"]
    assert said[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] == said[semconv.PAGEMESH_TOKENS_DRAFTED] == 0
