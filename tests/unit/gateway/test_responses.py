"""A response in JSON: a stream's events put together say what the whole response says."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.unit.gateway.support import END, MODEL
from tests.unit.gateway.test_render import USAGE, Said, ids_of
from tests.unit.gateway.test_response_body import FLAT, FORMAT
from tests.unit.gateway.test_tool_calls import NOW, QWEN, ROME
from tests.unit.gateway.test_tool_grammar import with_template

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.response_body import parse_response
from pagemesh.gateway.api.response_render import ResponseRenderer, named_sse, renderer_of
from pagemesh.gateway.calls import events as ev

TOKENS = with_template(QWEN)
TOOLS: dict[str, Any] = {"tools": [FLAT, {"type": "function", "name": "clock"}]}
SCORED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@dataclass
class Told:
    """A response both ways."""

    whole: dict[str, Any]
    events: list[dict[str, Any]]

    @property
    def kinds(self) -> list[str]:
        """Of the events, without neighbours of the same."""
        kinds = [event["type"].removeprefix("response.") for event in self.events]
        return [kind for kind, _ in itertools.groupby(kinds)]


def renderer(body: dict[str, Any]) -> tuple[ResponseRenderer, int | None]:
    ask = parse_response(json.dumps({"input": "x", **body}).encode(), served=MODEL)
    made = renderer_of(ask, TOKENS, "resp_1", lambda: 9.5)
    assert isinstance(made, ResponseRenderer)
    return made, ask.logprobs


def told(body: dict[str, Any], said: Said, *, bytes_max: int = 1 << 20) -> Told:
    """What clients get of ``said``, valid for OpenAI's own types."""
    whole, logprobs = renderer(body)
    streamed, _ = renderer(body | {"stream": True})
    collected = whole.collect([ids_of("x")], bytes_max)
    chunks = streamed.opening([ids_of("x")])
    for event in said.events(logprobs):
        if isinstance(event, ev.Deliver):
            collected.delivered(0, event)
        else:
            collected.ended(0, event)
        chunks += streamed.chunks_of(0, event)
    chunks += streamed.last(USAGE)
    made = Told(
        json.loads(whole.response(collected, [ids_of("x")], USAGE)),
        [json.loads(chunk) for chunk in chunks],
    )
    check(made)
    return made


def check(made: Told) -> None:
    Response.model_validate(made.whole, strict=True)
    for number, event in enumerate(made.events):
        assert EVENT.validate_python(event, strict=True).type == event["type"]
        assert event["sequence_number"] == number
    last = made.events[-1]
    assert last["type"] == f"response.{made.whole['status']}"
    assert last["response"] == made.whole
    assert put_together(made.events) == made.whole["output"]


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as clients make them of deltas, which agree with those that are told as done."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            continue
        if "output_index" not in event:
            continue
        item = items[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
        match kind:
            case "content_part.added":
                item["content"].append(event["part"])
            case "output_text.delta":
                item["content"][0]["text"] += event["delta"]
                item["content"][0]["logprobs"] += event["logprobs"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "output_text.done":
                part = item["content"][0]
                assert (event["text"], event["logprobs"]) == (part["text"], part["logprobs"])
            case "content_part.done":
                assert event["part"] == item["content"][0]
            case "function_call_arguments.done":
                assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
            case "output_item.done":
                item["status"] = event["item"]["status"]
                assert event["item"] == item and item["status"] != "in_progress"
    return items


def summary(response: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (one["type"], one["name"], one["arguments"], one["status"])
        if one["type"] == "function_call"
        else (one["type"], one["content"][0]["text"], one["status"])
        for one in response["output"]
    ]


def test_a_text_is_a_message_of_one_part() -> None:
    made = told({}, Said(0, 0, ["Hel", "lo", END], "stop", held="!"))
    assert made.whole["status"] == "completed" and made.whole["incomplete_details"] is None
    (message,) = made.whole["output"]
    assert message["id"].startswith("msg_") and message["role"] == "assistant"
    (part,) = message["content"]
    assert part == {"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}
    assert made.kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert made.whole["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }


def test_a_response_says_what_was_asked_for_and_that_it_is_not_kept() -> None:
    fields: dict[str, Any] = {
        "instructions": "Be brief.", "temperature": 0.5, "top_p": 0.25, "metadata": {"a": "b"},
        "text": {"format": FORMAT}, "store": True, "max_output_tokens": 50, "user": "u",
        "reasoning": {"effort": "low"}, "presence_penalty": 0.5, "service_tier": "flex",
    } | TOOLS  # fmt: skip
    response = Response.model_validate(told(fields, Said(0, 0, ["x"], "stop")).whole)
    assert (response.id, response.created_at, response.completed_at) == ("resp_1", 9, 9)
    assert (response.model, response.instructions) == (MODEL, "Be brief.")
    assert (response.temperature, response.top_p) == (0.5, 0.25)
    assert response.metadata == {"a": "b"} and response.max_output_tokens == 50
    assert response.tool_choice == "auto" and response.parallel_tool_calls
    assert [tool.type for tool in response.tools] == ["function"] * 2
    assert response.truncation == "disabled" and response.service_tier == "default"
    assert response.model_extra is not None
    assert (response.model_extra["store"], response.model_extra["presence_penalty"]) == (False, 0.5)
    assert response.output_text == "x"


def test_an_answer_without_text_has_no_items() -> None:
    made = told({}, Said(0, 0, [END], "stop"))
    assert made.whole["output"] == [] and made.whole["status"] == "completed"
    assert made.kinds == ["created", "in_progress", "completed"]


def test_a_text_that_was_cut_off_is_incomplete() -> None:
    made = told({}, Said(0, 0, ["ab"], "length"))
    assert made.whole["status"] == "incomplete"
    assert made.whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert summary(made.whole) == [("message", "ab", "incomplete")]
    assert made.kinds[-1] == "incomplete" and made.whole["completed_at"] is None


def test_calls_are_items_beside_the_text() -> None:
    made = told(TOOLS, Said(0, 0, [f"I look.\n{ROME}\n{NOW}"], "stop"))
    assert summary(made.whole) == [
        ("message", "I look.", "completed"),
        ("function_call", "weather", '{"city": "Rome"}', "completed"),
        ("function_call", "clock", "{}", "completed"),
    ]
    _, first, second = made.whole["output"]
    assert first["call_id"].startswith("call_") and first["id"].startswith("fc_")
    assert first["call_id"] != second["call_id"]
    assert made.kinds[2:] == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *[
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]
        * 2,
        "completed",
    ]


def test_an_answer_of_calls_alone_has_no_message() -> None:
    made = told(TOOLS, Said(0, 0, list(ROME), "stop"))
    assert [one["type"] for one in made.whole["output"]] == ["function_call"]


@pytest.mark.parametrize(("finish", "status"), [("length", "incomplete"), ("stop", "completed")])
def test_a_call_that_was_cut_off_is_incomplete(finish: str, status: str) -> None:
    made = told(TOOLS, Said(0, 0, [ROME[:50]], finish))
    assert made.whole["status"] == status
    (call,) = made.whole["output"]
    assert call["status"] == "incomplete" and '{"city": "Rome"}'.startswith(call["arguments"])


def test_calls_that_were_ended_stay_complete_when_the_answer_is_cut_off() -> None:
    made = told(TOOLS, Said(0, 0, [ROME + "\n"], "length"))
    assert made.whole["status"] == "incomplete"
    assert [one["status"] for one in made.whole["output"]] == ["completed"]


def test_log_probabilities_are_those_of_the_text() -> None:
    made = told(SCORED, Said(0, 0, ["a", "b", END], "stop", held="c"))
    rows = made.whole["output"][0]["content"][0]["logprobs"]
    assert [(row["token"], row["logprob"], len(row["top_logprobs"])) for row in rows] == [
        ("a", -0.5, 2),
        ("b", -0.5, 2),
    ]
    made = told(SCORED | TOOLS, Said(0, 0, [f"so {ROME}"], "stop"))
    rows = made.whole["output"][0]["content"][0]["logprobs"]
    assert "".join(row["token"] for row in rows) == "so "


def test_the_last_token_is_scored_though_its_text_is_not_shown() -> None:
    """A stop string that ends the answer is left out, but its tokens count."""
    said = Said(0, 0, ["ab"], "stop")
    (event, end) = said.events(2)
    assert isinstance(event, ev.Deliver) and isinstance(end, ev.ChoiceEnded)
    made, _ = renderer(SCORED | {"stream": True})
    cut = ev.Deliver(0, 0, event.tokens, "a", event.logprobs, 0)
    chunks = [*made.chunks_of(0, cut), *made.chunks_of(0, end), *made.last(USAGE)]
    events = [json.loads(chunk) for chunk in chunks]
    rows = put_together(events)[0]["content"][0]["logprobs"]
    assert [row["token"] for row in rows] == ["a", "b"]


@given(
    st.sampled_from(
        [
            ({}, "Hello there"),
            (SCORED, "Hällo Wörld"),
            (TOOLS, f"I look.\n{ROME}\n{NOW}"),
            (TOOLS, ROME[:40]),
            (TOOLS, "no <tool_call> at all <tool"),
            (TOOLS, f"{ROME} and text"),
            (SCORED | TOOLS, f"Sö.\n{ROME}"),
        ]
    ),
    st.sampled_from(["stop", "length"]),
    st.data(),
)
def test_however_a_text_is_cut_the_response_is_the_same(
    asked: tuple[dict[str, Any], str], finish: str, data: st.DataObject
) -> None:
    body, text = asked
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    in_pieces = told(body, Said(0, 0, pieces, finish))
    assert in_pieces.whole == told(body, Said(0, 0, [text], finish)).whole


def test_an_answer_that_is_too_large_to_be_kept_is_refused() -> None:
    with pytest.raises(ApiError, match="exceeds 10 bytes") as caught:
        told({}, Said(0, 0, ["x" * 11], "stop"), bytes_max=10)
    assert caught.value.code == "answer_too_large"
    with pytest.raises(ApiError, match="exceeds 100 bytes"):
        told(SCORED, Said(0, 0, ["xxx"], "stop"), bytes_max=100)


@pytest.mark.parametrize(("status", "code"), [(503, "server_error"), (429, "rate_limit_exceeded")])
def test_an_answer_that_breaks_off_says_why_twice(status: int, code: str) -> None:
    """OpenAI's own library raises the first; others look at the response alone."""
    made, _ = renderer({"stream": True})
    error = ApiError(status, "it broke", "input", "stopped")
    first, second = (json.loads(chunk) for chunk in made.failed(error))
    assert EVENT.validate_python(first, strict=True).type == "error"
    assert (first["code"], first["message"], first["param"]) == ("stopped", "it broke", "input")
    assert first["error"] == json.loads(error.body())["error"]
    assert EVENT.validate_python(second, strict=True).type == "response.failed"
    assert second["response"]["status"] == "failed"
    assert second["response"]["error"] == {"code": code, "message": "it broke"}
    assert [first["sequence_number"], second["sequence_number"]] == [0, 1]


def test_an_event_has_the_name_of_its_type() -> None:
    data = b'{"type":"response.created","text":"a\xc2\x85"}'
    assert named_sse(data) == (
        b'event: response.created\ndata: {"type":"response.created","text":"a\\u0085"}\n\n'
    )
