"""What is wrong with a body, in words."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.gateway.test_openai_api import chat

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.openai_api import parse_chat


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_told_to_be_empty(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body is empty"):
        parse_chat(body, served="m")


def test_a_body_that_is_no_object_is_told_what_is_meant() -> None:
    with pytest.raises(ApiError, match="the body: expected an object, got an array"):
        parse_chat(b"[]", served="m")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": 1}, "model: expected a string or null, got an integer"),
        ({"messages": {}}, "messages: expected an array, got an object"),
        ({"stream": "yes"}, "stream: expected true or false or null, got a string"),
        (
            {"messages": [{"role": "`int`", "content": ""}]},
            "messages[0].role: invalid enum value '`int`'; roles are system, developer, user and "
            "assistant",
        ),
        ({"top_logprobs": -1}, "top_logprobs: expected an integer >= 0"),
    ],
)
def test_a_value_of_another_type_is_told_in_words(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**wrong)
    assert str(caught.value.message) == words
