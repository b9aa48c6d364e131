"""The openai SDK against a whole mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from tests.integration.mesh import Mesh
from tests.integration.tiny_model import CONTEXT_TOKENS

pytestmark = pytest.mark.slow
MODEL = "tiny"
PROMPT = "the quick brown fox jumps over the lazy dog and " * 4


@pytest.fixture(scope="module")
def mesh(module_pool_dir: Path, tiny_model: Path) -> Iterator[Mesh]:
    with Mesh(module_pool_dir, model=tiny_model, deterministic=True) as made:
        yield made
        made.wait_idle()


def ask(client: OpenAI, text: str, **more: object) -> str:
    answer = client.completions.create(
        model=MODEL, prompt=text, temperature=0, max_tokens=12,
        extra_body={"ignore_eos": True, **more},
    )  # fmt: skip
    return answer.choices[0].text


def test_the_served_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_chat_is_answered_with_true_usage(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=5,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_the_same_prompt_again_comes_from_the_cache_with_the_same_tokens(client: OpenAI) -> None:
    prompt = "said only by this test: " + PROMPT
    answers = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
        for _ in range(2)
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    usage = answers[1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    # Every full page, but the last token is always computed.
    expected = (usage.prompt_tokens - 1) // 16 * 16
    assert usage.prompt_tokens_details.cached_tokens == expected


def test_a_stream_says_what_the_whole_answer_says_and_ends_with_usage(client: OpenAI) -> None:
    whole = ask(client, PROMPT)
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=PROMPT, temperature=0, max_tokens=12, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


def test_n_choices_with_a_seed_are_told_apart_and_repeatable(client: OpenAI) -> None:
    def draw() -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, n=4, seed=7, temperature=1, max_tokens=8,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return [choice.text for choice in sorted(answer.choices, key=lambda one: one.index)]

    first = draw()
    assert len(set(first)) == 4
    assert draw() == first


def test_an_unknown_model_is_404(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="nobody"):
        client.completions.create(model="nobody", prompt="x")


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1), ("n", 1_000_000), ("max_tokens", -5)]
)
def test_a_bad_value_is_400_and_names_its_parameter(
    client: OpenAI, field: str, value: object
) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="x", extra_body={field: value})
    assert caught.value.param == field


def test_a_prompt_beyond_the_context_is_400_with_both_numbers(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[1] * (CONTEXT_TOKENS + 1), max_tokens=1)
    assert str(CONTEXT_TOKENS) in str(caught.value)
    assert str(CONTEXT_TOKENS + 1) in str(caught.value) or str(CONTEXT_TOKENS + 2) in str(
        caught.value
    )


async def test_thirty_two_in_flight_get_the_answers_they_get_alone(mesh: Mesh) -> None:
    prompts = [f"{index} {PROMPT}" for index in range(32)]

    async with AsyncOpenAI(
        base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=100
    ) as client:

        async def one(prompt: str) -> str:
            answer = await client.completions.create(
                model=MODEL, prompt=prompt, temperature=0, max_tokens=8,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return answer.choices[0].text

        together = await asyncio.gather(*(one(prompt) for prompt in prompts))
        alone = [await one(prompt) for prompt in prompts[:4]]
    assert together[:4] == alone


async def test_a_client_that_leaves_frees_its_pages(mesh: Mesh) -> None:
    async with AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=1_500, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for _ in stream:
            break
        assert (await mesh.ask_report()).leases, "it was still being served"
        await stream.close()
    await asyncio.to_thread(mesh.wait_idle)
