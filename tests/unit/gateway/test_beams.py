"""A beam search as its gateway sees it: what is asked for, and an answer that comes whole."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.unit.gateway.support import DECODE, frame, spec
from tests.unit.gateway.test_openai_api import FACTS as SMALL
from tests.unit.gateway.test_openai_api import completion
from tests.unit.gateway.test_request import Desk

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.openai_api import Ask, parse_chat
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.call_facts import CallFacts
from pagemesh.gateway.calls.choice import TextPiece, TokensOnly
from pagemesh.gateway.calls.prepare import fit
from pagemesh.gateway.calls.request import RequestCore
from pagemesh.gateway.calls.spec import RequestLimits, RequestSpec
from pagemesh.runtime.metrics import REGISTRY
from pagemesh.runtime.trace import new_trace
from pagemesh.wire.tokens import U32, pack
from pagemesh.wire.work_messages import Beams, Hypothesis, TopLogprobs

FACTS = msgspec.structs.replace(SMALL, context_tokens_max=1_000, pool_pages=20)


def asked(**fields: Any) -> Ask:
    return completion(**{"use_beam_search": True, **fields})


def searching(keep: int = 2, *, logprobs: int | None = None) -> RequestSpec:
    plain = spec(choices=keep, stop_tokens=(9,))
    sampling = msgspec.structs.replace(
        plain.sampling, logprobs=logprobs, beams=Beams(width=4, keep=keep)
    )
    return replace(plain, sampling=sampling)


def found(*tokens: int) -> Hypothesis:
    stopped = tokens[-1] == 9
    return Hypothesis(
        tokens=pack(tokens),
        logprobs=TopLogprobs(chosen=np.full(len(tokens), -0.5, "<f4").tobytes()),
        score=-0.5,
        finish="stop" if stopped else "length",
        stop_token=9 if stopped else None,
    )


def answered(desk: Desk, *answers: Hypothesis, attempt: int = 1) -> list[ev.Command]:
    last = frame(0, [], attempt=attempt, finish="stop")
    return desk.feed(ev.FrameArrived(DECODE, msgspec.structs.replace(last, hypotheses=[*answers])))


def test_a_search_is_asked_for_with_the_width_of_best_of_or_its_own_name() -> None:
    assert asked(n=2, best_of=6).beams == Beams(width=6, keep=2)
    assert asked(beam_width=3, length_penalty=0.5, early_stopping="never").beams == Beams(
        width=3, keep=1, length_penalty=0.5, early_stopping="never"
    )
    assert asked().beams == Beams(width=4, keep=1)
    assert asked(n=7, temperature=0, early_stopping=True).beams == Beams(
        width=7, keep=7, early_stopping=True
    )
    body = {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "n": 2}
    chat = parse_chat(json.dumps(body).encode(), served="tiny")
    assert chat.beams == Beams(width=4, keep=2) and not chat.selects


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"best_of": 17}, "best_of"),
        ({"beam_width": 17}, "beam_width"),
        ({"n": 17}, "n"),
        ({"n": 5, "best_of": 4}, "best_of"),
        ({"n": 5, "beam_width": 4}, "beam_width"),
        ({"best_of": 5, "beam_width": 4}, "best_of"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"length_penalty": 9}, "length_penalty"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "max_tokens": 0}, "max_tokens"),
        ({"use_beam_search": False, "beam_width": 3}, "beam_width"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
def test_what_a_search_cannot_take_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_beams_that_can_never_fit_the_pool_are_refused_with_both_numbers() -> None:
    prompt = np.arange(10, dtype="<u4")
    (work,) = fit(asked(beam_width=4, max_tokens=70), [prompt], FACTS, frozenset(), seed=1)
    assert work.sampling.beams == Beams(width=4, keep=1)
    with pytest.raises(ApiError, match=r"384 token slots.* 320: lower") as caught:
        fit(asked(beam_width=4, max_tokens=80), [prompt], FACTS, frozenset(), seed=1)
    assert caught.value.param == "beam_width"


def test_a_length_that_is_left_open_is_what_all_beams_have_room_for() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True}
    chat = parse_chat(json.dumps(body).encode(), served="tiny")
    prompt = np.arange(40, dtype="<u4")
    (work,) = fit(chat, [prompt], FACTS, frozenset(), seed=1)
    pages = Beams(width=4, keep=1).pages_max
    assert pages(40, work.sampling.max_tokens, 16) <= FACTS.pool_pages
    assert pages(40, work.sampling.max_tokens + 1, 16) > FACTS.pool_pages


def test_a_search_is_one_sequence_whose_answers_are_as_many_choices() -> None:
    desk = Desk(searching())
    (submit,) = [one for one in desk.start() if isinstance(one, ev.SendSubmit)]
    assert [start.choice for start in submit.message.choices] == [0]
    assert desk.feed(ev.FrameArrived(DECODE, frame(0, [], cached=4))) == []
    out = answered(desk, found(5, 6, 9), found(7, 8))
    delivered = [one for one in out if isinstance(one, ev.Deliver)]
    assert [(one.choice, one.tokens.tolist(), one.hidden_count) for one in delivered] == [
        (0, [5, 6, 9], 1),
        (1, [7, 8], 0),
    ]
    assert all(one.logprobs is None for one in delivered), "nobody asked for them"
    ended = [one for one in out if isinstance(one, ev.ChoiceEnded)]
    assert [(one.choice, one.finish) for one in ended] == [(0, "stop"), (1, "length")]
    assert out[-1] == ev.Ended(ev.Completed())
    assert (desk.core.usage.completion_tokens, desk.core.usage.cached_tokens) == (5, 4)


def test_answers_come_with_their_log_probabilities_when_they_are_asked_for() -> None:
    desk = Desk(searching(1, logprobs=0))
    desk.start()
    (delivered,) = [one for one in answered(desk, found(5, 9)) if isinstance(one, ev.Deliver)]
    assert delivered.logprobs is not None and len(delivered.logprobs.chosen) == 2 * 4


def test_a_search_whose_worker_is_lost_begins_anew_and_an_answer_that_comes_late_is_dropped() -> (
    None
):
    desk = Desk(searching())
    desk.start()
    desk.feed(ev.FrameArrived(DECODE, frame(0, [])))
    desk.feed(ev.WorkerLost(DECODE))
    desk.wait(1_000)
    assert answered(desk, found(5), found(6)) == []
    (again,) = [one for one in desk.start() if isinstance(one, ev.SendSubmit)]
    assert (again.message.attempt, again.message.choices[0].generated) == (2, b"")
    assert answered(desk, found(5), found(6), attempt=2)[-1] == ev.Ended(ev.Completed())


@pytest.mark.parametrize("second", [[], [msgspec.structs.replace(found(5), tokens=b"\1")]])
def test_a_search_whose_answer_is_not_whole_is_tried_again(second: list[Hypothesis]) -> None:
    desk = Desk(searching(2))
    desk.start()
    out = answered(desk, found(5), *second)
    assert not any(isinstance(one, ev.Deliver | ev.Ended) for one in out)


class _StopsAt(TokensOnly):
    """Text that has its stop string after one token."""

    def push(self, tokens: U32) -> TextPiece:
        return TextPiece("a", 1, "b")


def test_a_stop_string_ends_an_answer_where_it_stands() -> None:
    core = RequestCore(searching(1), RequestLimits(), [_StopsAt()], 0)
    desk = Desk(searching(1))
    desk.core = core
    desk.start()
    out = answered(desk, found(5, 6, 9))
    (delivered,) = [one for one in out if isinstance(one, ev.Deliver)]
    (ended,) = [one for one in out if isinstance(one, ev.ChoiceEnded)]
    assert (delivered.tokens.tolist(), delivered.text, ended.stop_reason) == ([5], "a", "b")
    assert core.usage.completion_tokens == 1


def test_an_answer_that_comes_whole_says_nothing_of_the_time_between_tokens() -> None:
    def timed(name: str) -> float:
        labels = {"endpoint": "text_completion"}
        return REGISTRY.get_sample_value(f"pagemesh_gateway_{name}_seconds_count", labels) or 0.0

    def tell(ask: Ask, desk: Desk, out: list[ev.Command]) -> None:
        facts = CallFacts(ask, "http", new_trace(ratio=0.0), start_us=0)
        for one in out:
            if isinstance(one, ev.Deliver):
                facts.delivered(one, now_us=5_000)
            elif isinstance(one, ev.ChoiceEnded):
                facts.finish_reasons.append(one.finish)
        facts.close([desk.core], now_us=6_000)

    names = ("time_to_first_token", "time_per_output_token")
    before = [timed(name) for name in names]
    desk = Desk(searching())
    desk.start()
    tell(asked(n=2), desk, answered(desk, found(5, 6, 9), found(7, 8)))
    assert [timed(name) for name in names] == [before[0] + 1, before[1]]
    desk = Desk(spec())
    desk.start()
    tell(completion(), desk, desk.arrive(frame(0, [5, 6], finish="length")))
    assert [timed(name) for name in names] == [before[0] + 2, before[1] + 1]
