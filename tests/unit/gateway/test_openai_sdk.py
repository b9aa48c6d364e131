"""The HTTP door as the real OpenAI SDK sees it, with fake workers behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from tests.unit.gateway.fake_mesh import FakeMesh
from tests.unit.gateway.support import MODEL, eventually

from pagemesh.wire.errors import Busy


@pytest.fixture
async def client(mesh: FakeMesh) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=mesh.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def says(mesh: FakeMesh, text: str, *, ends: bool = True) -> None:
    """Have every worker answer anything with ``text``."""
    tokens = mesh.front.tokens
    ids = tokens.encode(text, add_special_tokens=False).tolist()
    ids += sorted(tokens.end_tokens) if ends else []
    for worker in mesh.workers:
        worker.speech = lambda _prompt: ids


async def test_a_chat_is_answered_whole_with_true_usage(
    mesh: FakeMesh, client: AsyncOpenAI
) -> None:
    says(mesh, "hello there")
    mesh.worker.cached_tokens = 3
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=50
    )
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("hello there", "stop")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    prompt = "[user]hi<|end|>[assistant]"
    count = len(mesh.front.tokens.encode(prompt, add_special_tokens=False))
    assert answer.usage.prompt_tokens == count
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.usage.completion_tokens == len("hello there") - 2 + 1  # "the" is one token


async def test_a_stream_has_the_role_first_and_usage_last(
    mesh: FakeMesh, client: AsyncOpenAI
) -> None:
    says(mesh, "höllo wörld")
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "höllo wörld"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop" and reasons.count(None) == len(reasons) - 1
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_best_of_more_choices_come_first_and_all_of_them_are_paid_for(
    mesh: FakeMesh, client: AsyncOpenAI
) -> None:
    says(mesh, "abc")
    mesh.worker.choice_logprobs = {0: -2.0, 1: -0.25, 2: -3.0, 3: -1.0}
    answer = await client.completions.create(
        model=MODEL, prompt=["x", "y"], n=2, best_of=4, logprobs=0, max_tokens=9
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    found = [choice.logprobs.token_logprobs for choice in answer.choices if choice.logprobs]
    assert found == [[-0.25] * 3, [-1.0] * 3] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * 4 * 4, "three letters and the end, each time"
    quiet = await client.completions.create(model=MODEL, prompt="x", best_of=2, max_tokens=9)
    assert [choice.logprobs for choice in quiet.choices] == [None]


async def test_n_choices_are_numbered_and_each_ends(mesh: FakeMesh, client: AsyncOpenAI) -> None:
    says(mesh, "abc")
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], n=4, seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.message.content for choice in answer.choices} == {"abc"}
    assert len(mesh.worker.submits) == 1
    assert mesh.worker.submits[0].sampling.seed == 7


async def test_a_stop_string_cuts_the_text_and_stops_the_worker(
    mesh: FakeMesh, client: AsyncOpenAI
) -> None:
    says(mesh, "one two three four five", ends=False)
    mesh.worker.pause_s = 0.002
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], stop=["ee f", "zzz"]
    )
    assert answer.choices[0].message.content == "one two thr"
    assert answer.choices[0].finish_reason == "stop"
    await eventually(lambda: not mesh.worker.running_count)
    assert mesh.worker.aborts[0].reason == "stop"


async def test_completions_take_several_prompts_and_echo(
    mesh: FakeMesh, client: AsyncOpenAI
) -> None:
    says(mesh, "xyz", ends=False)
    answer = await client.completions.create(
        model=MODEL, prompt=["ab", "cd"], n=2, echo=True, max_tokens=3
    )
    assert [choice.text for choice in answer.choices] == ["abxyz", "abxyz", "cdxyz", "cdxyz"]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage is not None and answer.usage.completion_tokens == 12


async def test_a_prompt_is_echoed_as_it_was_given(mesh: FakeMesh, client: AsyncOpenAI) -> None:
    says(mesh, "xyz", ends=False)
    encode = mesh.front.tokens.encode
    ids = encode("a<|end|>b", add_special_tokens=False).tolist()
    assert len(ids) == 3
    for prompt, shown in (("a<|end|>b", "a<|end|>b"), (ids, "ab")):
        whole = await client.completions.create(model=MODEL, prompt=prompt, echo=True, max_tokens=3)
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, echo=True, max_tokens=3, stream=True
        )
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
        assert (whole.choices[0].text, streamed) == (shown + "xyz", shown + "xyz")


async def test_of_a_prompt_that_ends_amid_a_character_the_answer_says_that(
    mesh: FakeMesh, client: AsyncOpenAI
) -> None:
    ids = mesh.front.tokens.encode("a\U0001f600", add_special_tokens=False).tolist()[:-1]
    whole = await client.completions.create(model=MODEL, prompt=ids, echo=True, max_tokens=0)
    assert whole.choices[0].text == "a\ufffd"


async def test_a_stream_holds_no_character_that_a_client_may_take_for_the_end_of_a_line(
    mesh: FakeMesh, client: AsyncOpenAI
) -> None:
    text = "a\u2028b\u2029c\x85d\u00c2\u0085"
    says(mesh, text)
    talk: Any = [{"role": "user", "content": "x"}]
    stream = await client.chat.completions.create(model=MODEL, messages=talk, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == text
    body = {"messages": talk, "stream": True}
    async with (
        httpx.AsyncClient() as http,
        http.stream("POST", mesh.url + "/v1/chat/completions", json=body) as answer,
    ):
        lines = [line async for line in answer.aiter_lines()]
    assert all(not line or line.startswith("data: ") for line in lines)


async def test_chat_log_probabilities_name_each_token_and_its_alternatives(
    mesh: FakeMesh, client: AsyncOpenAI
) -> None:
    says(mesh, "hi")
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(row.token, row.logprob, row.bytes) for row in logprobs.content] == [
        ("h", -0.5, [104]),
        ("i", -0.5, [105]),
    ]
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-1.0, -2.0]


async def test_a_prompt_is_scored_by_echo_without_tokens(
    mesh: FakeMesh, client: AsyncOpenAI
) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt="abc", echo=True, max_tokens=0, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "abc" and logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [None, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 2]
    assert not mesh.worker.submits[0].read_cache


async def test_extensions_reach_the_worker(mesh: FakeMesh, client: AsyncOpenAI) -> None:
    says(mesh, "abcdef", ends=False)
    answer = await client.completions.create(
        model=MODEL,
        prompt=[65, 66],
        max_tokens=9,
        temperature=0.0,
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "min_tokens": 2,
            "stop_token_ids": [mesh.front.tokens.encode("d", add_special_tokens=False)[0].item()],
            "ignore_eos": True,
            "return_token_ids": True,
            "priority": -3,
        },
    )
    (submit,) = mesh.worker.submits
    assert (submit.sampling.top_k, submit.sampling.min_p, submit.priority) == (5, 0.1, -3)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("abc", "stop")
    extra = choice.model_extra or {}
    assert extra["stop_reason"] == extra["token_ids"][-1]
    assert extra["prompt_token_ids"] == [65, 66]


async def test_models_are_listed_and_found(mesh: FakeMesh, client: AsyncOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature"),
        ({"temperature": 2.5}, openai.BadRequestError, "temperature"),
        ({"n": 1_000_000}, openai.BadRequestError, "n"),
        ({"stop": ["x"] * 17}, openai.BadRequestError, "stop"),
        ({"top_logprobs": 21, "logprobs": True}, openai.BadRequestError, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools[0].function"),
        ({"response_format": {"type": "x"}}, openai.BadRequestError, "response_format.type"),
        ({"max_tokens": 5_000}, openai.BadRequestError, "max_tokens"),
        ({"nonsense": 1}, openai.BadRequestError, "nonsense"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "logit_bias"),
    ],
)
async def test_a_bad_value_is_named(
    client: AsyncOpenAI,
    fields: dict[str, object],
    kind: type[openai.APIStatusError],
    param: str,
) -> None:
    with pytest.raises(kind) as caught:
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], extra_body=fields
        )
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["param"] == param


async def test_too_long_a_prompt_gets_both_numbers(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"length is 3200 tokens, .*prompt has 5000"):
        await client.completions.create(model=MODEL, prompt=[1] * 5_000)
    with pytest.raises(openai.BadRequestError, match=r"3200 .*pool.* has 3190, .* 10 at most"):
        await client.completions.create(model=MODEL, prompt=[1] * 3_190, max_tokens=11)


async def test_a_refusing_mesh_is_503_with_retry_after(mesh: FakeMesh, client: AsyncOpenAI) -> None:
    mesh.worker.refusal = Busy("full", retry_after_ms=10)
    mesh.front._limits = mesh.front._limits.__class__(failures_max=1)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model=MODEL, prompt="x")
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_thirty_two_requests_at_once_are_all_answered(
    mesh: FakeMesh, client: AsyncOpenAI
) -> None:
    mesh.worker.pause_s = 0.001
    texts = [f"prompt {index:02}" for index in range(32)]
    answers = await asyncio.gather(
        *(
            client.completions.create(model=MODEL, prompt=text, max_tokens=len(text))
            for text in texts
        )
    )
    assert [answer.choices[0].text for answer in answers] == [text[::-1] for text in texts]


async def test_a_client_that_leaves_stops_the_worker(mesh: FakeMesh, client: AsyncOpenAI) -> None:
    mesh.worker.pause_s = 0.01
    stream = await client.completions.create(
        model=MODEL, prompt="abc", max_tokens=3_000, stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    await eventually(lambda: not mesh.worker.running_count)
    await eventually(lambda: not mesh.front.gateway.in_flight_count)
    assert mesh.worker.aborts[0].reason == "client"


async def test_lost_frames_are_had_again(mesh: FakeMesh, client: AsyncOpenAI) -> None:
    mesh.worker.drop_counters = {2, 5}
    text = "lost frames come again"
    answer = await client.completions.create(model=MODEL, prompt=text, max_tokens=len(text))
    assert answer.choices[0].text == text[::-1]
