"""The openai SDK asks for responses, over a whole mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall
from tests.integration.mesh import Mesh
from tests.integration.test_tools import CLOCK, WEATHER, check

pytestmark = pytest.mark.slow
MODEL = "pagemesh-demo"
QUESTION = "What is the weather in Rome?"
_FUNCTIONS: list[Any] = [WEATHER["function"], CLOCK["function"]]
TOOLS: list[Any] = [{"type": "function", **function} for function in _FUNCTIONS]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "input": [{"role": "user", "content": QUESTION}],
    "max_output_tokens": 400,
    "extra_body": {"seed": 3},
}
STORY: dict[str, Any] = {
    "type": "json_schema",
    "name": "story",
    "strict": True,
    "schema": {
        "type": "object",
        "properties": {
            "animal": {"type": "string", "enum": ["fox", "cat"]},
            "age": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["animal", "age"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def mesh(module_pool_dir: Path) -> Iterator[Mesh]:
    with Mesh(module_pool_dir) as made:
        yield made
        made.wait_idle()


def calls_of(response: Response) -> list[ResponseFunctionToolCall]:
    return [one for one in response.output if one.type == "function_call"]


def streamed(client: OpenAI, **fields: Any) -> Response:
    """The final response of a stream, which the SDK puts together from its events."""
    with client.responses.stream(**ASKED | fields) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


def test_a_response_says_what_the_equivalent_chat_says(client: OpenAI) -> None:
    asked = ASKED | {"temperature": 0.0, "max_output_tokens": 24, "instructions": "Be brief."}
    talk: Any = [{"role": "system", "content": "Be brief."}, *ASKED["input"]]
    chat = client.chat.completions.create(
        model=MODEL, messages=talk, temperature=0.0, max_tokens=24
    )
    response = client.responses.create(**asked)
    assert response.output_text == chat.choices[0].message.content
    assert chat.usage is not None and response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.input_tokens_details.cached_tokens > 0, "they share pages"
    assert streamed(client, **asked).output_text == response.output_text


def test_an_answer_of_few_tokens_is_incomplete(client: OpenAI) -> None:
    response = client.responses.create(**ASKED | {"max_output_tokens": 2})
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and response.usage.output_tokens == 2
    events = list(client.responses.create(**ASKED | {"max_output_tokens": 2}, stream=True))
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_function_is_called_and_its_result_goes_back(client: OpenAI) -> None:
    asked = {"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}}
    whole = client.responses.create(**ASKED | asked | {"temperature": 0.0})
    parts = streamed(client, **asked, temperature=0.0)
    (call,) = calls_of(whole)
    assert whole.status == "completed" and call.name == "weather"
    check(call.name, call.arguments)
    assert [one.arguments for one in calls_of(parts)] == [call.arguments]
    talk = [
        *ASKED["input"],
        *(one.model_dump() for one in whole.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"},
    ]
    last = {"tools": TOOLS, "tool_choice": "none", "max_output_tokens": 20, "temperature": 0.0}
    answer = client.responses.create(**ASKED | last | {"input": talk})
    assert not calls_of(answer)
    function = {"name": call.name, "arguments": call.arguments}
    messages: Any = [
        *ASKED["input"],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "sun"},
    ]
    chat_tools: Any = [WEATHER, CLOCK]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, tools=chat_tools, tool_choice="none", max_tokens=20,
        temperature=0.0,
    )  # fmt: skip
    assert chat.usage is not None and answer.usage is not None
    assert chat.usage.prompt_tokens == answer.usage.input_tokens
    assert chat.choices[0].message.content == answer.output_text


def test_several_calls_come_in_a_stream(client: OpenAI) -> None:
    response = streamed(client, tools=TOOLS, tool_choice="required", temperature=1.0)
    calls = calls_of(response)
    assert calls and not response.output_text
    for call in calls:
        if call.status == "completed":
            check(call.name, call.arguments)


def test_a_format_is_followed_whole_and_streamed(client: OpenAI) -> None:
    text: Any = {"format": STORY}
    whole = client.responses.create(**ASKED | {"text": text, "temperature": 1.0})
    for response in (whole, streamed(client, text=text, temperature=1.0)):
        made = json.loads(response.output_text)
        assert response.status == "completed" and set(made) == {"animal", "age"}
        assert made["animal"] in ("fox", "cat") and made["age"] in range(1, 10)


def test_nothing_is_kept(client: OpenAI) -> None:
    response = client.responses.create(**ASKED | {"max_output_tokens": 2, "store": True})
    assert response.model_extra is not None and response.model_extra["store"] is False
    with pytest.raises(NotFoundError, match="no response is kept here"):
        client.responses.retrieve(response.id)
