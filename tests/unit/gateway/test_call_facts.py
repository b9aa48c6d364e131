"""What is measured of a call that ends."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.unit.gateway.support import MODEL, ROUTE, frame, spec
from tests.unit.gateway.test_request import Desk

from pagemesh.gateway import measures
from pagemesh.gateway.api.openai_api import Ask, parse_completion
from pagemesh.gateway.calls.call_facts import CallFacts
from pagemesh.gateway.calls.events import Deliver
from pagemesh.gateway.calls.request import RequestCore
from pagemesh.runtime.trace import new_trace

START_US, FIRST_US, LAST_US, END_US = 1_000_000, 1_250_000, 3_250_000, 3_500_000
TIMES = ("request_seconds", "first_token_seconds", "token_seconds")


def answered(choices: int, tokens: int) -> RequestCore:
    """All of a request's choices, each of so many tokens."""
    desk = Desk(spec(choices=choices, max_tokens=tokens))
    desk.start()
    for choice in range(choices):
        desk.arrive(frame(0, list(range(1, tokens + 1)), choice=choice, finish="length"))
    return desk.core


@dataclass
class Observed:
    """Of a histogram since a moment: how often, and how much in all."""

    count: float
    seconds: float


def observed(name: str) -> Observed:
    values = {
        sample.name.rpartition("_")[2]: sample.value
        for metric in getattr(measures, name).collect()
        for sample in metric.samples
        if sample.labels["endpoint"] == "text_completion" and "le" not in sample.labels
    }
    return Observed(values.get("count", 0), values.get("sum", 0))


def delivery(tokens: int) -> Deliver:
    return Deliver(0, 0, np.arange(tokens, dtype="<u4"), "", None, 0)


def asked_for(**more: Any) -> Ask:
    return parse_completion(
        json.dumps({"model": MODEL, "prompt": "a"} | more).encode(), served=MODEL
    )


def measured(choices: int, tokens: int, *, ended: bool = True, **asked: Any) -> dict[str, Any]:
    """How often each time was observed of a call, and what it was: pairs."""
    before = {name: observed(name) for name in TIMES}
    facts = CallFacts(asked_for(n=choices, **asked), "http", new_trace(), START_US)
    facts.delivered(delivery(0), START_US + 1)
    facts.delivered(delivery(1), FIRST_US)
    facts.delivered(delivery(1), LAST_US)
    facts.finish_reasons += ["length"] * (choices if ended else choices - 1)
    facts.close([answered(choices, tokens)], END_US)
    after = {name: observed(name) for name in TIMES}
    return {
        name: (after[name].count - before[name].count, after[name].seconds - before[name].seconds)
        for name in TIMES
    }


@pytest.mark.parametrize(("choices", "tokens"), [(1, 5), (4, 5), (2, 2)])
def test_times_are_of_the_call_of_its_first_token_and_between_tokens_of_a_choice(
    choices: int, tokens: int
) -> None:
    found = measured(choices, tokens)
    assert found["request_seconds"] == (1, pytest.approx(2.5))
    assert found["first_token_seconds"] == (1, pytest.approx(0.25))
    assert found["token_seconds"] == (1, pytest.approx(2.0 / (tokens - 1)))


def test_nothing_lies_between_the_tokens_of_answers_that_have_one_each() -> None:
    assert measured(3, 1)["token_seconds"] == (0, 0)


def test_a_call_that_is_cut_off_counts_for_its_first_token_alone() -> None:
    found = measured(2, 5, ended=False)
    assert found["first_token_seconds"] == (1, pytest.approx(0.25))
    assert found["request_seconds"] == found["token_seconds"] == (0, 0)


def test_beams_come_all_at_once_and_have_no_time_between_tokens() -> None:
    found = measured(2, 5, use_beam_search=True, best_of=2, temperature=0)
    assert found["token_seconds"] == (0, 0)
    assert found["request_seconds"] == (1, pytest.approx(2.5))


@pytest.mark.parametrize(
    ("name", "count"),
    [("prompt_tokens", 8), ("output_tokens", 6), ("cached_tokens", 4), ("elsewhere_tokens", 7)],
)
def test_the_tokens_of_a_call_are_counted_when_it_ends(name: str, count: int) -> None:
    desk = Desk(spec(choices=2, max_tokens=3))
    desk.start(replace(ROUTE, elsewhere_tokens=7))
    for choice in range(2):
        one = frame(0, [1, 2, 3], choice=choice, finish="length", cached=4)
        desk.arrive(one)
    facts = CallFacts(asked_for(n=2), "http", new_trace(), START_US)
    counter = getattr(measures, name)
    before = counter._value.get()
    facts.close([desk.core], END_US)
    assert counter._value.get() == before + count
