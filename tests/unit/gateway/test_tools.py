"""What a body says of tools: what may be called, and what was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.gateway.test_openai_api import chat, messages_of

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.openai_api import Ask, ChatPrompt, parse_tokenize
from pagemesh.gateway.api.tools import Function, ToolUse

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


WEATHER = function("weather", description="of a city", parameters=SCHEMA)
CLOCK = function("clock")
TOOLS = [WEATHER, CLOCK]


def called(arguments: str, **more: Any) -> dict[str, Any]:
    """A message of the assistant with one call."""
    call = {"id": "call_1", **function("weather", arguments=arguments), **more}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def use_of(**fields: Any) -> ToolUse | None:
    return chat(**({"tools": TOOLS} | fields)).tools


def values_of(ask: Ask) -> Any:
    (prompt,) = ask.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt.template_values.get("tools")


@pytest.mark.parametrize(
    ("fields", "names", "choice", "parallel"),
    [
        ({}, ["weather", "clock"], "auto", True),
        (
            {"tool_choice": "auto", "parallel_tool_calls": False},
            ["weather", "clock"],
            "auto",
            False,
        ),
        ({"tool_choice": "required"}, ["weather", "clock"], "required", True),
        ({"tool_choice": function("clock")}, ["clock"], "named", False),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [function("weather")]},
                }
            },
            ["weather"],
            "required",
            True,
        ),
    ],
)
def test_a_choice_says_which_functions_may_be_called_and_how(
    fields: dict[str, Any], names: list[str], choice: str, parallel: bool
) -> None:
    use = use_of(**fields)
    assert use is not None
    assert [one.name for one in use.functions] == names
    assert (use.choice, use.parallel) == (choice, parallel)


def test_no_function_may_be_called_if_there_is_none_or_none_is_chosen() -> None:
    cases: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}, {"tools": None}]
    for fields in cases:
        ask = chat(**({"tools": TOOLS} | fields))
        assert ask.tools is None and values_of(ask) is None, fields


def test_a_schema_is_of_an_object_whether_or_not_it_says_so() -> None:
    tools = [function("a", parameters={"properties": {}}, strict=True), CLOCK]
    use = use_of(tools=tools)
    assert use is not None
    assert use.functions == (
        Function("a", {"type": "object", "properties": {}}, True, 0),
        Function("clock", None, False, 1),
    )


def test_a_template_gets_functions_as_they_were_given_and_parameters_in_any_case() -> None:
    own = {"tools": "mine", "mood": "calm"}
    assert values_of(chat(tools=[WEATHER], chat_template_kwargs=own)) == [WEATHER]
    assert values_of(chat(tools=[function("clock", strict=True)])) == [
        function("clock", parameters={"type": "object", "properties": {}})
    ]


def test_calls_and_their_results_reach_the_template_with_arguments_as_an_object() -> None:
    told = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sun"}]}
    messages = [called('{"city": "Rome"}'), told, called("", index=0), told | {"name": "weather"}]
    first, second, third, fourth = messages_of(chat(messages=messages))
    expected = function("weather", arguments={"city": "Rome"})
    assert first == {
        "role": "assistant", "content": "", "tool_calls": [{"id": "call_1", **expected}],
    }  # fmt: skip
    assert second == {"role": "tool", "content": "sun", "tool_call_id": "call_1"}
    assert third["tool_calls"][0]["function"]["arguments"] == {}
    assert fourth["name"] == "weather"


TOLD = {"role": "tool", "tool_call_id": "1", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [CLOCK | {"custom": {"name": "x"}}]}, "tools[0].custom"),
        ({"tools": [{"function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [function("no blanks")]}, "tools[0].function.name"),
        ({"tools": [function("n" * 65)]}, "tools[0].function.name"),
        ({"tools": [function("line\n")]}, "tools[0].function.name"),
        ({"tools": [function("x", odd=1)]}, "tools[0].function.odd"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [function(f"f{index}") for index in range(129)]}, "tools"),
        ({"tools": [function("x", parameters={"type": "array"})]},
         "tools[0].function.parameters"),
        ({"tools": [function("x", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": function("x")}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": function("x")}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools",
                          "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"use_beam_search": True}, "tools"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "f"}, "function_call"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        ({"messages": [TOLD | {"tool_call_id": None}]}, "messages[0].tool_call_id"),
        ({"messages": [TOLD | {"content": None}]}, "messages[0].content"),
        ({"messages": [called("{}") | {"role": "user", "content": "x"}]},
         "messages[0].tool_calls"),
        ({"messages": [called("[1]")]}, "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [called("{}", type="custom")]}, "messages[0].tool_calls[0].type"),
        ({"messages": [called("{}", custom={})]}, "messages[0].tool_calls[0].custom"),
        ({"messages": [called("{}", id=None)]}, "messages[0].tool_calls[0].id"),
        ({"messages": [called("{}")], "continue_final_message": True}, "continue_final_message"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_tools_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**({"tools": TOOLS} | fields))
    assert (caught.value.status, _numbered(caught.value.param)) == (400, _numbered(param))


@pytest.mark.parametrize("text", ['{"a":', "[" * 9_999, '{"city": "Ro'])
def test_a_call_that_was_cut_off_may_be_sent_back(text: str) -> None:
    [message] = messages_of(chat(tools=TOOLS, messages=[called(text)]))
    assert message["tool_calls"][0]["function"]["arguments"] == text


def _numbered(param: str) -> str:
    """Types are checked without counting, so such messages have no index."""
    return param.replace("[0]", "").replace("[1]", "")


def test_who_still_uses_functions_learns_what_to_use() -> None:
    with pytest.raises(ApiError, match="functions is not supported: use tools"):
        chat(functions=[{"name": "f"}])


def test_what_is_tokenised_may_have_tools_if_it_is_a_chat() -> None:
    talk = {"messages": [{"role": "user", "content": "x"}]}
    assert parse_tokenize(json.dumps(talk | {"tools": TOOLS}).encode()).tools is not None
    for body in ({"prompt": "x", "tools": TOOLS}, talk | {"tools": [CLOCK, CLOCK]}):
        with pytest.raises(ApiError, match=r"tools|clock"):
            parse_tokenize(json.dumps(body).encode())
