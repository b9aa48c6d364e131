"""A body of ``/v1/responses`` asks for what the equivalent chat asks for, or is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.unit.gateway.test_openai_api import chat, messages_of
from tests.unit.gateway.test_tools import SCHEMA, TOOLS, WEATHER, function

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.openai_api import Ask
from pagemesh.gateway.api.response_body import own_names, parse_response

FLAT = {"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "name": "place", "schema": SCHEMA}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "sun"}
IMAGE = {"type": "input_image", "image_url": "https://a/b.png"}
CALLED = {"id": "call_1", **function("weather", arguments="{}")}


def response(**fields: Any) -> Ask:
    body = {"model": "tiny", "input": "hi", **fields}
    return parse_response(json.dumps(body).encode(), served="tiny")


def plain(ask: Ask) -> Ask:
    """Without what only the answer's form needs."""
    same = replace(ask, max_tokens_name="", grammar_name="", include_usage=False)
    return replace(same, repeated=None)


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({}, {}),
        ({"max_output_tokens": 5}, {"max_completion_tokens": 5}),
        ({"temperature": 0.5, "top_p": 0.25}, {"temperature": 0.5, "top_p": 0.25}),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, {"stream": True}),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {}),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        (
            {"text": {"format": FORMAT | {"strict": True, "description": None, "odd": None}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        (
            {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
            {"logprobs": True, "top_logprobs": 3},
        ),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"include": ["reasoning.encrypted_content"], "top_logprobs": 0}, {}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"tools": []}, {}),
        ({"tools": [FLAT | {"strict": None, "odd": None}]}, {"tools": [WEATHER]}),
        (
            {
                "tools": [FLAT | {"strict": True}],
                "tool_choice": {"type": "function", "name": "weather"},
            },
            {
                "tools": [{"type": "function", "function": WEATHER["function"] | {"strict": True}}],
                "tool_choice": function("weather"),
            },
        ),
        (
            {
                "tools": [FLAT, {"type": "function", "name": "clock"}],
                "parallel_tool_calls": False,
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "clock"}],
                },
            },
            {
                "tools": TOOLS,
                "parallel_tool_calls": False,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [function("clock")]},
                },
            },
        ),
        ({"tools": [FLAT], "tool_choice": "none"}, {"tools": [WEATHER], "tool_choice": "none"}),
        (
            {"metadata": {"a": "b"}, "user": "u", "store": True, "service_tier": "flex"},
            {"metadata": {"a": "b"}},
        ),
        ({"background": False, "truncation": "disabled", "n": 1, "conversation": None}, {}),
        ({"odd": None, "text": {"odd": None}, "reasoning": {"odd": None}}, {}),
    ],
)
def test_a_body_asks_for_what_a_chat_asks_for(fields: dict[str, Any], same: dict[str, Any]) -> None:
    assert plain(response(**fields)) == plain(chat(**same))


def test_parameters_of_ours_are_those_of_chats() -> None:
    fields = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 0.5, "seed": 7,
        "frequency_penalty": -0.5, "logit_bias": {"5": 1.0}, "stop": ["a"], "min_tokens": 2,
        "stop_token_ids": [4], "ignore_eos": True, "skip_special_tokens": False,
        "include_stop_str_in_output": True, "add_special_tokens": True, "cache_salt": "s",
        "cache_ttl_s": 60, "priority": -3, "request_id": "mine", "model": "other",
        "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False,
    }  # fmt: skip
    assert plain(response(**fields)) == plain(chat(**fields))
    regex = {"structured_outputs": {"regex": "a+"}}
    assert response(**regex).grammar == chat(**regex).grammar != ""
    assert response(**regex).grammar_name == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"input": "hi"}, [{"role": "user", "content": "hi"}]),
        (
            {"input": "hi", "instructions": "Be brief."},
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        ),
        (
            {
                "input": [
                    {"role": "developer", "content": "Be brief."},
                    {
                        "type": "message",
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "a"},
                            {"type": "input_text", "text": "b"},
                        ],
                    },
                    {
                        "type": "message",
                        "id": "msg_1",
                        "status": "completed",
                        "role": "assistant",
                        "phase": None,
                        "content": [
                            {
                                "type": "output_text",
                                "text": "c",
                                "annotations": [],
                                "logprobs": None,
                            }
                        ],
                    },
                    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
                    {"role": "user", "content": ""},
                ]
            },
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "a\nb"},
                {"role": "assistant", "content": "c"},
                {"role": "assistant", "content": "No."},
                {"role": "user", "content": ""},
            ],
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "?"},
                    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
                    {"role": "assistant", "content": "I look."},
                    CALL | {"id": "fc_1", "status": "completed", "namespace": None},
                    CALL | {"call_id": "call_2", "arguments": '{"city": "Rome"}'},
                    OUTPUT | {"id": None},
                    OUTPUT
                    | {"call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]},
                ]
            },
            [
                {"role": "user", "content": "?"},
                {
                    "role": "assistant",
                    "content": "I look.",
                    "tool_calls": [
                        {"id": "call_1", **function("weather", arguments={})},
                        {"id": "call_2", **function("weather", arguments={"city": "Rome"})},
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
                {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
            ],
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "?"},
                    {
                        "type": "reasoning",
                        "summary": [{"type": "summary_text", "text": "short"}],
                        "content": [{"type": "reasoning_text", "text": "Look it up."}],
                    },
                    CALL,
                    OUTPUT,
                    {
                        "type": "reasoning",
                        "content": [{"type": "reasoning_text", "text": "Say it."}],
                    },
                    {"role": "assistant", "content": "Sun."},
                ]
            },
            [
                {"role": "user", "content": "?"},
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "Look it up.",
                    "tool_calls": [{"id": "call_1", **function("weather", arguments={})}],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
                {"role": "assistant", "content": "Sun.", "reasoning_content": "Say it."},
            ],
        ),
    ],
)
def test_items_are_the_messages_of_a_chat(
    fields: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    assert messages_of(response(**fields)) == messages


def test_calls_and_their_results_are_what_a_chat_has() -> None:
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]
    same = plain(chat(messages=talk, tools=[WEATHER]))
    items = [{"role": "user", "content": "hi"}, CALL, OUTPUT]
    assert plain(response(input=items, tools=[FLAT])) == same


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "hi"}, fields]}


def content(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation as input"),
        ({"conversation": "conv_1"}, "conversation", "whole conversation as input"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "as instructions or input"),
        ({"background": True}, "background", "ask again without it"),
        ({"max_tool_calls": 3}, "max_tool_calls", "leave it out"),
        ({"context_management": []}, "context_management", "send what shall count"),
        ({"moderation": {"model": "m"}}, "moderation", "leave it out"),
        ({"truncation": "auto"}, "truncation", "shorten the input"),
        ({"include": ["odd"]}, "include[0]", "'odd'"),
        ({"top_logprobs": 2}, "top_logprobs", "requires include"),
        ({"top_logprobs": 21}, "top_logprobs", "20"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1"),
        ({"max_output_tokens": 1, "min_tokens": 2}, "min_tokens", "exceeds max_output_tokens 1"),
        ({"max_tokens": 5}, "max_tokens", "use max_output_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "use max_output_tokens"),
        ({"response_format": {"type": "text"}}, "response_format", "use text.format"),
        ({"n": 2}, "n", "use chat completions"),
        ({"use_beam_search": True}, "use_beam_search", "use chat completions"),
        ({"return_token_ids": True}, "return_token_ids", "use chat completions"),
        ({"messages": []}, "messages", "use input"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "use reasoning.effort"),
        ({"odd": 1}, "odd", "unknown parameter"),
        ({"guided_regex": "a"}, "guided_regex", "structured_outputs"),
        ({"text": {"odd": 1}}, "text.odd", "unknown parameter"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "verbosity other than medium"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "'grammar'"),
        ({"text": {"format": {}}}, "text.format.type", "missing"),
        ({"text": {"format": FORMAT | {"schema": None}}}, "text.format.schema", "missing"),
        ({"text": {"format": FORMAT | {"name": None}}}, "text.format.name", "missing"),
        ({"text": {"format": FORMAT | {"odd": 1}}}, "text.format.odd", "unknown parameter"),
        (
            {"text": {"format": FORMAT}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "either text.format or",
        ),
        ({"text": {"format": FORMAT}, "min_tokens": 1}, "min_tokens", "with text.format"),
        ({"reasoning": {"odd": 1}}, "reasoning.odd", "unknown parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "'mcp'"),
        ({"tools": [FLAT, {"type": "custom", "name": "x"}]}, "tools[1].type", "'custom'"),
        ({"tools": [{"name": "x"}]}, "tools[0].type", "missing"),
        ({"tools": [WEATHER]}, "tools[0].function", "beside type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"tools": [FLAT | {"odd": 1}]}, "tools[0].odd", "unknown parameter"),
        ({"tools": [FLAT, FLAT]}, "tools[1].name", "two functions"),
        (
            {"tools": [FLAT | {"parameters": {"type": "array"}}]},
            "tools[0].parameters",
            "type object",
        ),
        ({"tools": [FLAT], "tool_choice": "odd"}, "tool_choice", "must be none"),
        ({"tool_choice": "required"}, "tool_choice", "requires tools"),
        (
            {"tools": [FLAT], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice",
            "no function 'x'",
        ),
        ({"tools": [FLAT], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "'mcp'"),
        ({"tools": [FLAT], "tool_choice": {"name": "x"}}, "tool_choice.type", "missing"),
        (
            {
                "tools": [FLAT],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "mcp", "name": "x"}],
                },
            },
            "tool_choice.tools[0].type",
            "'mcp'",
        ),
        ({"tools": [FLAT], "ignore_eos": True}, "ignore_eos", "with tools"),
        ({"input": None}, "input", "input"),
        ({"input": []}, "input", "input"),
        (item(type="item_reference", id="msg_1"), "input[1]", "store: false"),
        (item(id="msg_1"), "input[1]", "store: false"),
        (item(content="x"), "input[1].type", "missing"),
        (item(type="web_search_call", id="x"), "input[1].type", "'web_search_call'"),
        (item(role="tool", content="x"), "input[1].role", "role"),
        (item(role="user"), "input[1].content", "missing"),
        (item(role="user", content="x", odd=1), "input[1].odd", "unknown parameter"),
        (item(**CALL | {"arguments": "[]"}), "input[1].arguments", "JSON object"),
        (item(**CALL | {"name": "a b"}), "input[1].name", "input[1].name"),
        (item(**OUTPUT | {"call_id": None}), "input[1].call_id", "missing"),
        (item(**OUTPUT | {"output": [IMAGE]}), "input[1].output[0].type", "'input_image'"),
        (item(type="reasoning", content=[{"type": "odd"}]), "input[1].content[0].type", "'odd'"),
        (content(IMAGE), "input[0].content[0].type", "'input_image'"),
        (content({"type": "input_file", "file_id": "x"}), "input[0].content[0].type", "input_file"),
        (content({"text": "x"}), "input[0].content[0].type", "missing"),
        (content({"type": "input_text"}), "input[0].content[0].text", "missing"),
        (content({"type": "input_text", "text": 1}), "input[0].content[0].text", "a string"),
        (
            {"continue_final_message": True},
            "continue_final_message",
            "must have the role assistant",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    fields: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(ApiError) as caught:
        response(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert told in caught.value.message


def test_too_many_calls_in_a_row_are_refused() -> None:
    with pytest.raises(ApiError, match="more than 128 calls") as caught:
        response(input=[CALL] * 129)
    assert caught.value.param == "input[128]"


def test_an_answer_repeats_what_was_asked_for() -> None:
    fields: dict[str, Any] = {
        "instructions": "Be brief.", "max_output_tokens": 9, "metadata": {"a": "b"}, "user": "u",
        "tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False,
        "text": {"format": FORMAT}, "reasoning": {"effort": "low"}, "prompt_cache_key": "k",
        "safety_identifier": "s",
    }  # fmt: skip
    told = json.loads(msgspec.json.encode(response(**fields).repeated))
    assert told.pop("text") == {"format": FORMAT | {"strict": False}, "verbosity": "medium"}
    assert told.pop("tools") == [FLAT | {"strict": False}]
    assert told.pop("reasoning") == {"effort": "low", "summary": None}
    assert told.pop("top_logprobs") == 0
    left = {name: fields[name] for name in fields if name not in ("text", "tools", "reasoning")}
    assert told == left


def test_later_errors_have_the_names_of_responses_too() -> None:
    for before, after in {
        "messages": "input",
        "tools[3].function.parameters": "tools[3].parameters",
        "temperature": "temperature",
    }.items():
        with pytest.raises(ApiError) as caught, own_names():
            raise ApiError(400, "wrong", before)
        assert caught.value.param == after
