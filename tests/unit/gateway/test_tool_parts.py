"""Calls in OpenAI's JSON: whole, and in chunks that say the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.unit.gateway import test_render
from tests.unit.gateway.test_render import CHAT, Said, Told, ids_of
from tests.unit.gateway.test_tool_calls import LISTED, MISTRAL_V3, NOW, QWEN, ROME
from tests.unit.gateway.test_tool_grammar import with_template
from tests.unit.gateway.test_tools import TOOLS, function

ASKED = CHAT | {"tools": TOOLS}
WEATHER = {"name": "weather", "arguments": '{"city": "Rome"}'}


@pytest.fixture(autouse=True)
def _model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that calls."""
    monkeypatch.setattr(test_render, "TOKENS", with_template(QWEN))


def told(body: dict[str, Any], *said: Said) -> Told:
    made = test_render.told(body, *said)
    ChatCompletion.model_validate(made.whole, strict=True)
    for chunk in made.opening + made.chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    return made


def streamed(made: Told, index: int = 0) -> dict[str, Any]:
    """The message that a choice's chunks make up, as clients put it together."""
    content, calls = "", list[dict[str, Any]]()
    for chunk in made.opening + made.chunks:
        choice = chunk["choices"][0]
        if choice["index"] != index:
            continue
        content += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls", []):
            at = piece.pop("index")
            if at == len(calls):
                calls.append(piece)
            else:
                assert set(piece) == {"function"} and set(piece["function"]) == {"arguments"}
                calls[at]["function"]["arguments"] += piece["function"]["arguments"]
    message = {"role": "assistant", "content": content or None, "refusal": None}
    return message | ({"tool_calls": calls} if calls else {})


def both(body: dict[str, Any], *said: Said, index: int = 0) -> tuple[dict[str, Any], Any]:
    """The message of a choice, the same in both ways; and the reason for its end."""
    made = told(body, *said)
    choice = made.whole["choices"][index]
    assert choice["message"] == streamed(made, index)
    assert made.ends[index] == (choice["finish_reason"], choice["stop_reason"])
    return choice["message"], choice["finish_reason"]


@pytest.mark.parametrize("by_letter", [False, True])
def test_calls_are_told_from_text_whole_and_in_chunks(by_letter: bool) -> None:
    text = f"I look.\n{ROME}\n{NOW}"
    message, finish = both(ASKED, Said(0, 0, list(text) if by_letter else [text], "stop"))
    assert (message["content"], finish) == ("I look.", "tool_calls")
    first, second = message["tool_calls"]
    assert (first["type"], first["function"]) == ("function", WEATHER)
    assert second["function"] == {"name": "clock", "arguments": "{}"}
    assert re.fullmatch("call_[0-9a-f]{24}", first["id"]) and first["id"] != second["id"]


def test_the_first_chunk_of_a_call_names_it_and_the_others_go_on() -> None:
    before, key, after = ROME.partition('"city"')
    made = told(ASKED, Said(0, 0, [before, key, after], "stop"))
    deltas = [chunk["choices"][0]["delta"] for chunk in made.chunks]
    (begun,) = deltas[0]["tool_calls"]
    assert begun["function"] == {"name": "weather", "arguments": "{"}
    assert deltas[1] == {"tool_calls": [{"index": 0, "function": {"arguments": '"city"'}}]}
    assert deltas[3] == {}
    assert all("content" not in delta for delta in deltas)


def test_an_answer_without_calls_is_what_it_is_without_tools() -> None:
    said = Said(0, 0, ["Hel", "lo <", "b"], "stop", held=" there <tool")
    message, finish = both(ASKED, said)
    assert message == {"role": "assistant", "content": "Hello <b there <tool", "refusal": None}
    assert finish == "stop"
    assert both(ASKED, Said(0, 0, [], "stop"))[0]["content"] is None


@pytest.mark.parametrize(
    ("more", "text", "ended", "finish"),
    [
        ({}, ROME, "stop", "tool_calls"),
        ({}, ROME, "length", "length"),
        ({}, ROME[:50], "length", "length"),
        ({}, ROME[:50], "stop", "stop"),
        ({"tool_choice": "required"}, ROME, "stop", "tool_calls"),
        ({"tool_choice": function("weather")}, ROME, "stop", "stop"),
    ],
)
def test_the_reason_for_the_end_is_what_openai_gives(
    more: dict[str, Any], text: str, ended: str, finish: str
) -> None:
    message, reason = both(ASKED | more, Said(0, 0, [text], ended))
    assert reason == finish
    (call,) = message["tool_calls"]
    assert WEATHER["arguments"].startswith(call["function"]["arguments"])


def test_each_choice_has_its_own_calls() -> None:
    said = [Said(0, 0, list(ROME), "stop"), Said(0, 1, ["No."], "stop"), Said(0, 2, [ROME], "stop")]
    messages = [both(ASKED | {"n": 3}, *said, index=index)[0] for index in range(3)]
    assert "tool_calls" not in messages[1]
    ids = {messages[index]["tool_calls"][0]["id"] for index in (0, 2)}
    assert len(ids) == 2


def test_scores_and_token_ids_come_with_tokens_whose_text_is_held_back() -> None:
    asked = ASKED | {"logprobs": True, "return_token_ids": True}
    made = told(asked, Said(0, 0, ["so ", "<tool", "_call>\n", ROME[12:]], "stop"))
    ids = ids_of(f"so {ROME}").tolist()
    assert made.ids[0] == made.whole["choices"][0]["token_ids"] == ids
    scored = [chunk["choices"][0]["logprobs"] for chunk in made.chunks]
    assert sum(len(one["content"]) for one in scored if one) == len(ids)
    assert made.chunks[1]["choices"][0]["delta"] == {}
    assert len(made.whole["choices"][0]["logprobs"]["content"]) == len(ids)


def test_what_is_held_back_alone_makes_no_chunk() -> None:
    made = told(ASKED, Said(0, 0, ["so ", "<tool", "_call>\n", "{"], "length"))
    assert [chunk["choices"][0]["delta"] for chunk in made.chunks] == [
        {"content": "so "},
        {"content": "<tool_call>\n{"},
    ]
    assert made.whole["choices"][0]["message"]["content"] == "so <tool_call>\n{"


def test_some_templates_take_only_short_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_render, "TOKENS", with_template(MISTRAL_V3))
    message, _ = both(ASKED, Said(0, 0, [f"{LISTED}]"], "stop"))
    [call] = message["tool_calls"]
    assert re.fullmatch("[a-z0-9]{9}", call["id"]) and call["function"] == WEATHER
