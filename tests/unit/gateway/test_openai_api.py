"""Bodies understood, and rendered answers, field by field."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_params

from pagemesh.gateway.api.api_errors import ApiError, cancelled, from_fault
from pagemesh.gateway.api.openai_api import Ask, ChatPrompt, parse_chat, parse_completion
from pagemesh.gateway.api.openai_types import ChatBody, CompletionBody, StreamOptions
from pagemesh.gateway.calls.events import WhyCancelled
from pagemesh.gateway.calls.prepare import fit
from pagemesh.wire.errors import (
    Busy,
    DeadlineExceeded,
    Denied,
    Disconnected,
    Fault,
    Gone,
    Internal,
    Malformed,
    NoCapacity,
    NotReady,
    Stale,
    Superseded,
)
from pagemesh.wire.presence import ModelFacts

FACTS = ModelFacts(
    model="tiny",
    model_root=b"m" * 32,
    context_tokens_max=100,
    vocab_tokens=50,
    page_size=16,
    pool_pages=5,
    deterministic=False,
)


def chat(**fields: Any) -> Ask:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_chat(json.dumps(body).encode(), served="tiny")


def completion(**fields: Any) -> Ask:
    body = {"model": "tiny", "prompt": "hi", **fields}
    return parse_completion(json.dumps(body).encode(), served="tiny")


def messages_of(ask: Ask) -> list[dict[str, Any]]:
    (prompt,) = ask.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def test_the_model_that_is_served_is_meant_when_none_is_named() -> None:
    assert parse_completion(b'{"prompt": "hi"}', served="tiny").model == "tiny"
    assert chat(model=None).model == "tiny"
    assert chat(model="other").model == "other"
    assert chat(model="").model == ""


def test_null_means_the_default() -> None:
    names = "temperature top_p n stop stream seed max_tokens logit_bias user tools min_p".split()
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"metadata": {"team": "search"}},
        {"service_tier": "flex"},
        {"parallel_tool_calls": False},
        {"user": "u" * 600},
        {"safety_identifier": "s"},
        {"prompt_cache_key": "k"},
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"ttl": "24h"}},
        {"prediction": {"type": "content", "content": "hi"}},
        {"verbosity": "medium"},
        {"modalities": ["text"]},
        {"tools": [], "tool_choice": "auto"},
        {"response_format": {"type": "text"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_cannot_change_the_answer_is_taken(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


def test_options_of_a_stream_that_cannot_change_its_text_are_taken() -> None:
    plain = {"include_usage": True}
    more = plain | {"include_obfuscation": False, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=more) == chat(stream=True, stream_options=plain)


def test_the_effort_of_reasoning_is_the_templates_business() -> None:
    def values(**fields: Any) -> dict[str, Any]:
        (prompt,) = chat(**fields).prompts
        assert isinstance(prompt, ChatPrompt)
        return dict(prompt.template_values)

    assert values() == {}
    assert values(reasoning_effort="low") == {"reasoning_effort": "low"}
    own = {"reasoning_effort": "high", "thinking": True}
    assert values(reasoning_effort="low", chat_template_kwargs=own) == own


def test_what_the_assistant_thought_goes_to_the_template_under_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        told = [
            {"role": "assistant", "content": "a", name: "why"},
            {"role": "user", "content": "b"},
        ]
        first, _ = messages_of(chat(messages=told))
        assert first == {"role": "assistant", "content": "a", "reasoning_content": "why"}


def test_every_parameter_of_the_openai_sdk_is_known_here() -> None:
    """Known, be it refused: none of them is a typing error to us."""
    asked = chat_params.CompletionCreateParamsBase.__annotations__.keys()
    options = ChatCompletionStreamOptionsParam.__annotations__.keys()
    assert asked - {field.name for field in msgspec.structs.fields(ChatBody)} == set()
    assert options - {field.name for field in msgspec.structs.fields(StreamOptions)} == set()
    asked = text_params.CompletionCreateParamsBase.__annotations__.keys()
    assert asked - {field.name for field in msgspec.structs.fields(CompletionBody)} == set()


def test_a_parameter_nobody_knows_is_refused_by_name() -> None:
    for ask in (chat, completion):
        with pytest.raises(ApiError) as caught:
            ask(temprature=0.1)
        assert (caught.value.status, caught.value.param) == (400, "temprature")
        assert caught.value.code == "unknown_parameter"


def test_no_alternatives_need_no_log_probabilities() -> None:
    assert chat(top_logprobs=0) == chat(top_logprobs=0, logprobs=False) == chat()


def test_max_completion_tokens_goes_over_max_tokens() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert completion(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(max_tokens=5).max_tokens == 5
    assert chat().max_tokens is None
    assert completion().max_tokens is None and completion().open_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1], [2, 3], [4]], 3)],
)
def test_a_prompt_is_text_or_tokens_or_a_list_of_either(prompt: Any, count: int) -> None:
    assert len(completion(prompt=prompt).prompts) == count


def test_text_parts_become_one_text_and_developers_speak_as_the_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    ask = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts, "name": "me"},
            {"role": "assistant", "content": None, "refusal": "no", "tool_calls": None},
        ]
    )
    assert messages_of(ask) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one\ntwo", "name": "me"},
        {"role": "assistant", "content": "no"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "nobody", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "odd": 1}]}, "messages[0].odd"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x" * 300]}, "stop[0]"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"odd": True}, "stream": True}, "stream_options.odd"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"priority": 1001}, "priority"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty"),
        ({"seed": 1 << 64}, "seed"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"__x__": 1}}, "chat_template_kwargs"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_message_without_words_lacks_a_parameter() -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=[{"role": "user"}])
    assert caught.value.code == "missing_required_parameter"
    assert caught.value.message == "missing parameter: messages[0].content"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "n": 2, "length_penalty": 0.5}, "length_penalty"),
        ({"prompt": ["a"] * 100, "best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
    ],
)
def test_what_is_wrong_with_a_completion_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_tokens_and_limits_are_the_models() -> None:
    prompt = np.arange(10, dtype="<u4")
    ends = frozenset({3})
    (work,) = fit(chat(seed=-1, stop_token_ids=[7]), [prompt], FACTS, ends, seed=5)
    assert work.sampling.max_tokens == 70  # the pool's 80 slots, less the prompt
    assert work.sampling.seed == (1 << 64) - 1
    assert work.sampling.stop_tokens == [3, 7]
    (work,) = fit(chat(ignore_eos=True), [prompt], FACTS, ends, seed=5)
    assert (work.sampling.seed, work.sampling.stop_tokens) == (5, [])


def test_at_least_so_many_tokens_are_refused_where_they_do_not_fit() -> None:
    prompt = np.arange(10, dtype="<u4")
    assert fit(chat(min_tokens=70), [prompt], FACTS, frozenset(), seed=1)
    with pytest.raises(ApiError, match="min_tokens 71 exceeds the 70 that fit"):
        fit(chat(min_tokens=71), [prompt], FACTS, frozenset(), seed=1)


def test_completions_and_open_messages_go_on_from_their_prompts() -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    going_on = chat(messages=talk, continue_final_message=True, add_generation_prompt=False)
    for ask, goes_on in ((chat(), False), (going_on, True), (completion(), True)):
        (work,) = fit(ask, [np.ones(4, "<u4")], FACTS, frozenset(), seed=1)
        assert work.goes_on is goes_on


def test_prompts_of_one_call_draw_apart_unless_it_has_a_seed() -> None:
    prompts = [np.ones(4, "<u4")] * 3
    for seed, expected in ((None, {5, 6, 7}), (9, {9})):
        asked = completion(prompt=["x", "x", "x"], seed=seed)
        works = fit(asked, prompts, FACTS, frozenset(), seed=5)
        assert {work.sampling.seed for work in works} == expected


def test_an_answer_is_as_long_as_its_tenants_quota_allows() -> None:
    prompt = np.arange(10, dtype="<u4")
    (work,) = fit(chat(), [prompt], FACTS, frozenset(), seed=1, quota_tokens=32)
    assert work.sampling.max_tokens == 22
    with pytest.raises(ApiError) as caught:
        fit(chat(max_tokens=23), [prompt], FACTS, frozenset(), seed=1, quota_tokens=32)
    assert (caught.value.status, caught.value.code) == (400, "quota_exceeded")
    assert "33" in caught.value.message and "32" in caught.value.message


def test_a_completion_that_says_no_length_has_sixteen_tokens_or_what_is_left() -> None:
    for prompt_tokens, most in ((10, 16), (64, 16), (70, 10), (79, 1)):
        prompt = np.ones(prompt_tokens, "<u4")
        (work,) = fit(completion(), [prompt], FACTS, frozenset(), seed=1)
        assert work.sampling.max_tokens == most
    with pytest.raises(ApiError, match="80"):
        fit(completion(), [np.ones(80, "<u4")], FACTS, frozenset(), seed=1)
    with pytest.raises(ApiError, match="min_tokens 17 exceeds max_tokens 16"):
        completion(min_tokens=17)


def test_how_long_the_cache_is_kept_is_asked_for_in_seconds() -> None:
    assert chat().cache_ttl_s == 0 and chat(cache_ttl_s=60).cache_ttl_s == 60
    for wrong in (0, -1, 30 * 86_400 + 1, "60"):
        with pytest.raises(ApiError) as caught:
            chat(cache_ttl_s=wrong)
        assert caught.value.param == "cache_ttl_s"


@pytest.mark.parametrize(
    ("prompt", "fields", "numbers"),
    [
        (list(range(10)), {"max_tokens": 91}, ("91", "70")),
        (list(range(10)), {"max_tokens": 71}, ("71", "80")),
        ([1] * 100, {}, ("100", "80")),
        ([50], {}, ("50", "50")),
        ([1], {"logit_bias": {"50": 1}}, ("50", "50")),
        ([1], {"stop_token_ids": [60]}, ("60", "50")),
    ],
)
def test_what_does_not_fit_gets_both_numbers(
    prompt: list[int], fields: dict[str, Any], numbers: tuple[str, str]
) -> None:
    with pytest.raises(ApiError) as caught:
        fit(chat(**fields), [np.asarray(prompt, "<u4")], FACTS, frozenset(), seed=1)
    assert caught.value.status == 400
    for number in numbers:
        assert number in caught.value.message


def test_no_top_p_at_all_leaves_the_likeliest_token() -> None:
    (work,) = fit(chat(top_p=0), [np.arange(3, dtype="<u4")], FACTS, frozenset(), seed=1)
    assert 0 < work.sampling.top_p < 1e-6


def test_a_role_that_is_none_is_answered_with_those_that_are() -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=[{"role": "ai", "content": "x"}])
    assert caught.value.param == "messages[0].role"
    assert "'ai'; roles are system, developer, user, assistant and tool" in caught.value.message


def test_an_answer_that_is_cut_off_says_why() -> None:
    codes = [cancelled(why).code for why in get_args(WhyCancelled)]
    assert codes == ["cancelled", "slow_reader", "stopped"]
    assert cancelled("stopped").status == 503 and "ask again" in cancelled("stopped").message


def test_a_mesh_that_still_loads_does_not_say_that_it_is_overloaded() -> None:
    error = from_fault(NotReady("no worker for 'secret-name' is ready"))
    assert error.code == "not_ready" and error.message.startswith("no worker is ready yet")
    error = from_fault(Disconnected("the bus is away"))
    assert error.code == "not_ready" and "cannot reach its workers" in error.message


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Busy("x"), 503),
        (NotReady("x"), 503),
        (Disconnected("x"), 503),
        (NoCapacity("x", retry_after_ms=5), 503),
        (NoCapacity("x"), 400),
        (Stale("x"), 500),
        (Superseded("x"), 503),
        (Gone("x"), 500),
        (Internal("x"), 500),
        (Malformed("x"), 500),
        (Denied("x"), 403),
        (DeadlineExceeded("x"), 504),
    ],
)
def test_every_fault_has_a_status_and_all_four_fields(fault: Fault, status: int) -> None:
    error = from_fault(fault)
    assert error.status == status
    assert ("retry-after" in error.headers) == (status == 503)
    assert set(msgspec.json.decode(error.body())["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([{"text": "x"}], "type is missing"),
        ([{"type": "image_url"}], "not supported yet: content type 'image_url'"),
    ],
)
def test_a_part_without_a_type_is_told_so(content: list[Any], told: str) -> None:
    with pytest.raises(ApiError, match=re.escape(told)):
        chat(messages=[{"role": "user", "content": content}])
