"""The openai SDK has the demo model call functions, over a whole mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from tests.integration.mesh import Mesh

pytestmark = pytest.mark.slow
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TALK: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
ASKED: dict[str, Any] = {
    "model": "pagemesh-demo",
    "messages": TALK,
    "tools": [WEATHER, CLOCK],
    "max_tokens": 400,
    "seed": 3,
}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def mesh(module_pool_dir: Path) -> Iterator[Mesh]:
    with Mesh(module_pool_dir) as made:
        yield made
        made.wait_idle()


def check(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "weather":
        assert given["city"] in ("Rome", "Oslo") and given["days"] in range(1, 10)
        assert set(given) == {"city", "days"}
    else:
        assert (name, given) == ("clock", {})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_named_function_is_called_once_with_arguments_of_its_schema(
    client: OpenAI, temperature: float
) -> None:
    answer = client.chat.completions.create(
        **ASKED | {"tool_choice": NAMED, "n": 3, "temperature": temperature}
    )
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or []
        assert (choice.finish_reason, choice.message.content) == ("stop", None)
        assert call.function.name == "weather"
        check(call.function.name, call.function.arguments)


def test_required_calls_come_in_a_stream_and_may_be_answered(client: OpenAI) -> None:
    asked = ASKED | {"tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls or []
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    check(call.function.name, call.function.arguments)
    message = choice.message.model_dump(include={"role", "content", "tool_calls"})
    for one in message["tool_calls"]:
        one["function"].pop("parsed_arguments", None)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    answer = client.chat.completions.create(
        **ASKED | {"messages": [*TALK, message, result], "tool_choice": "none", "max_tokens": 20}
    )
    assert answer.choices[0].message.tool_calls is None


def test_a_model_that_may_call_may_also_talk(client: OpenAI) -> None:
    """Whatever it does: it was not trained on tools."""
    for choice in client.chat.completions.create(**ASKED | {"n": 4}).choices:
        for call in choice.message.tool_calls or []:
            if choice.finish_reason == "tool_calls":
                check(call.function.name, call.function.arguments)
        assert choice.message.tool_calls or choice.message.content is not None


def test_a_call_that_is_cut_off_is_shown_as_far_as_it_came(client: OpenAI) -> None:
    head = '<tool_call>\n{"name": "weather", "arguments": {'
    most = len(head) + 8  # tokens have a letter at least
    answer = client.chat.completions.create(**ASKED | {"tool_choice": NAMED, "max_tokens": most})
    choice = answer.choices[0]
    if choice.finish_reason == "length":
        (call,) = choice.message.tool_calls or []
        assert call.function.name == "weather"
    else:
        assert choice.finish_reason == "stop"


def test_a_schema_that_cannot_be_followed_is_refused(client: OpenAI) -> None:
    odd = {"name": "odd", "parameters": {"properties": {"a": {"type": "objekt"}}}}
    with pytest.raises(BadRequestError, match="objekt"):
        client.chat.completions.create(**ASKED | {"tools": [{"type": "function", "function": odd}]})
