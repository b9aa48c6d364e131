"""Log-probabilities that are lost: a prompt's come with the first frame, without which nothing is
delivered; an answer's are told as none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs
from tests.unit.gateway.fake_mesh import scores
from tests.unit.gateway.support import DECODE, MODEL, PREFILL, byte_tokenizer, frame, spec
from tests.unit.gateway.test_request import LIMITS, OTHER_ROUTE, Desk, of

from pagemesh.gateway.api.openai_api import parse_chat, parse_completion
from pagemesh.gateway.api.render import Renderer
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.spec import Usage
from pagemesh.gateway.words.tokens import Tokens
from pagemesh.wire.errors import Gone
from pagemesh.wire.messages import Ok, Refused
from pagemesh.wire.work_messages import Frame, TopLogprobs

SCORES = TopLogprobs(chosen=bytes(4 * 7))


def first(attempt: int = 1) -> Frame:
    """Prefill's, which it keeps for a while."""
    return structs.replace(frame(0, [5], attempt=attempt), prompt_logprobs=SCORES)


@pytest.fixture
def desk() -> Desk:
    """A request whose first frame was lost; decode's next one has come, with the answer's end."""
    made = Desk(spec(prompt_logprobs=True, max_tokens=2))
    made.start()
    out = made.arrive(frame(1, [6], finish="length"))
    asked = [(one.worker, one.message.position) for one in of(out, ev.SendResend)]
    assert asked == [(PREFILL, 0), (DECODE, 0)]
    return made


def test_prefill_is_asked_for_a_lost_first_frame_whoever_has_the_tokens_by_now(desk: Desk) -> None:
    whole = frame(0, [5, 6], finish="length")
    desk.arrive(whole)
    assert desk.tokens() == []
    assert of(desk.arrive(first(), PREFILL), ev.PromptScored) == [ev.PromptScored(SCORES)]
    key = whole.key
    gone = Refused.of(Gone("the sequence went on elsewhere"))
    assert desk.feed(ev.ResendAnswered(key, PREFILL, gone)) == []
    assert desk.feed(ev.ResendAnswered(key, DECODE, Ok())) == []
    desk.wait(LIMITS.silence_ms_max)
    desk.arrive(whole)
    assert (desk.tokens(), desk.ends()) == ([5, 6], [ev.Ended(ev.Completed())])


def test_where_nobody_has_the_scores_any_more_they_are_computed_again(desk: Desk) -> None:
    routes: list[ev.ChooseRoute] = []
    for _ in range(2 * LIMITS.resends_max):
        routes += of(desk.wait(LIMITS.gap_patience_ms), ev.ChooseRoute)
        if routes:
            break
        routes += of(desk.arrive(frame(0, [5, 6], finish="length")), ev.ChooseRoute)
    assert routes and desk.tokens() == []
    (submit,) = of(desk.place(OTHER_ROUTE), ev.SendSubmit)
    assert submit.message.prompt_logprobs and submit.message.choices[0].generated == b""
    desk.arrive(first(attempt=2), OTHER_ROUTE.worker)
    desk.arrive(frame(1, [6], attempt=2, finish="length"), OTHER_ROUTE.worker)
    assert (desk.tokens(), desk.ends()) == ([5, 6], [ev.Ended(ev.Completed())])


def test_a_prompt_whose_scores_alone_are_wanted_is_not_answered_without_them() -> None:
    desk = Desk(spec(prompt_logprobs=True, max_tokens=0))
    desk.start()
    desk.feed(ev.WorkerLost(PREFILL))
    assert desk.ends() == [] and of(desk.wait(100), ev.ChooseRoute)
    desk.place(OTHER_ROUTE)
    last = structs.replace(frame(0, [], attempt=2, finish="length"), prompt_logprobs=SCORES)
    assert of(desk.arrive(last, OTHER_ROUTE.worker), ev.PromptScored) == [ev.PromptScored(SCORES)]
    assert desk.ends() == [ev.Ended(ev.Completed())]


PIECES = (("abc", True), ("def", False), ("ghi", True))
"""Of an answer, and whether they have their scores."""


def choices_of(body: dict[str, Any], *, stream: bool) -> list[dict[str, Any]]:
    """The one choice of an answer of ``PIECES``, or what each chunk has of it."""
    tokens = Tokens(byte_tokenizer(), template=None, end_tokens=frozenset())
    parse = parse_chat if "messages" in body else parse_completion
    ask = parse(json.dumps(body).encode(), served=MODEL)
    renderer = Renderer(ask, tokens, response_id="x", created=0)
    prompt = tokens.encode("x", add_special_tokens=False)
    collected, first = renderer.collect([prompt]), 0
    chunks: list[bytes] = []
    for text, scored in PIECES:
        ids = tokens.encode(text, add_special_tokens=False)
        found = scores(ids.tolist(), 0) if scored else None
        event = ev.Deliver(0, first, ids, text, found, 0)
        first += len(ids)
        collected.delivered(0, event)
        chunks.append(renderer.delivered(0, event))
    whole = renderer.response(collected, [prompt], Usage(1, first, 0))
    return [json.loads(one)["choices"][0] for one in (chunks if stream else [whole])]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_completion_whose_scores_were_lost_have_none_and_keep_their_places(
    stream: bool,
) -> None:
    told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for choice in choices_of({"prompt": "x", "logprobs": 0}, stream=stream):
        for name, values in told.items():
            values += choice["logprobs"][name]
    assert told["tokens"] == list("abcdefghi")
    assert told["token_logprobs"] == [-0.5] * 3 + [None] * 3 + [-0.5] * 3
    assert told["text_offset"] == list(range(9))


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_leaves_out_tokens_whose_scores_were_lost(stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    choices = choices_of(body, stream=stream)
    parts = [choice["logprobs"] for choice in choices]
    named = [one["token"] for part in parts if part for one in part["content"]]
    assert named == list("abcghi")
