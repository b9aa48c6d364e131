"""What a body may say to the last, what is refused beyond it, and what null stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.gateway.test_openai_api import chat, completion, messages_of

from pagemesh.gateway.api.api_errors import ApiError
from pagemesh.gateway.api.openai_api import Ask

Parse = Callable[..., Ask]


def biases(count: int) -> dict[str, int]:
    return {str(token): 1 for token in range(count)}


def refused(parse: Parse, **fields: Any) -> str:
    """The parameter that is named."""
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value.param


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(
    ("name", "most", "beyond"),
    [
        ("n", 128, 129),
        ("temperature", 2.0, 2.01),
        ("top_p", 1.0, 1.01),
        ("min_p", 1.0, 1.01),
        ("top_k", -1, -2),
        ("presence_penalty", -2.0, -2.01),
        ("frequency_penalty", 2.0, 2.01),
        ("repetition_penalty", 10.0, 10.1),
        ("seed", -(1 << 63), -(1 << 63) - 1),
        ("priority", -1_000, -1_001),
        ("stop", ["x"] * 16, ["x"] * 17),
        ("stop_token_ids", [1] * 48, [1] * 49),
        ("cache_salt", "s" * 512, "s" * 513),
        ("request_id", "r" * 512, "r" * 513),
        ("logit_bias", biases(1_024), biases(1_025)),
        ("logit_bias", {"9" * 10: -100}, {"9" * 11: -100}),
    ],
)  # fmt: skip
def test_a_value_is_taken_up_to_its_limit(parse: Parse, name: str, most: Any, beyond: Any) -> None:
    assert parse(**{name: most})
    assert refused(parse, **{name: beyond}) == name


@pytest.mark.parametrize(
    ("parse", "most", "beyond"),
    [
        (completion, {"prompt": ["a"] * 128}, {"prompt": ["a"] * 129}),
        (completion, {"n": 2, "prompt": ["a"] * 64}, {"n": 2, "prompt": ["a"] * 65}),
        (completion, {"best_of": 2, "prompt": ["a"] * 64}, {"best_of": 2, "prompt": ["a"] * 65}),
        (completion, {"min_tokens": 16}, {"min_tokens": 17}),
        (completion, {"min_tokens": 8, "max_tokens": 8}, {"min_tokens": 9, "max_tokens": 8}),
        (completion, {"logprobs": 20}, {"logprobs": 21}),
        (chat, {"top_logprobs": 20, "logprobs": True}, {"top_logprobs": 21, "logprobs": True}),
        (chat, {"best_of": 3, "n": 3}, {"best_of": 2, "n": 3}),
        (chat, {"max_completion_tokens": 1}, {"max_completion_tokens": 0}),
    ],
)
def test_what_is_counted_together_is_taken_up_to_its_limit(
    parse: Parse, most: dict[str, Any], beyond: dict[str, Any]
) -> None:
    assert parse(**most) != parse()
    assert refused(parse, **beyond) == next(iter(beyond))


SAID = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "v"}}, "audio"),
        (
            {"messages": [SAID | {"tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": [SAID | {"function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"messages": [SAID | {"audio": {"id": "1"}}]}, "messages[0].audio"),
        (
            {"messages": [SAID], "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
    ],
)
def test_what_would_change_the_answer_and_is_not_done_is_refused(
    fields: dict[str, Any], param: str
) -> None:
    assert refused(chat, **fields) == param


def test_a_part_may_be_what_the_assistant_refused_and_of_two_thoughts_the_older_name_counts() -> (
    None
):
    parts = [{"type": "refusal", "refusal": "no"}, {"type": "input_text", "text": "why"}]
    told = SAID | {"content": parts, "reasoning": "new", "reasoning_content": "old"}
    assert messages_of(chat(messages=[told, {"role": "user", "content": "x"}]))[0] == {
        "role": "assistant",
        "content": "no\nwhy",
        "reasoning_content": "old",
    }


@pytest.mark.parametrize(
    ("said", "left_out"), [({}, True), ({"skip_special_tokens": None}, True),
                           ({"skip_special_tokens": False}, False)],
)  # fmt: skip
def test_special_tokens_are_left_out_unless_a_body_says_otherwise(
    said: dict[str, Any], left_out: bool
) -> None:
    assert chat(**said).skip_special_tokens is left_out


def test_a_chat_has_scores_where_it_asks_for_them_and_alternatives_where_it_says_how_many() -> None:
    found = [chat(logprobs=asked).logprobs for asked in (None, False, True)]
    assert found == [None, None, 0]
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert [completion(logprobs=asked).logprobs for asked in (None, 0, 3)] == [None, 0, 3]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ],
)
def test_a_stream_tells_its_usage_to_who_asks_for_it(
    options: dict[str, bool] | None, told: bool
) -> None:
    assert chat(stream=True, stream_options=options).include_usage is told
