"""Answers that follow a schema or a grammar, over a whole mesh, with OpenAI's SDK."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from tests.integration.mesh import Mesh

from pagemesh.runtime.model_folder import find_model

pytestmark = pytest.mark.slow
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
STORY: Any = {"role": "user", "content": "Tell me a story about a lamp."}


def schema(value: dict[str, Any] = PERSON) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": value, "strict": True}}


@pytest.fixture(scope="module")
def mesh(module_pool_dir: Path) -> Iterator[Mesh]:
    """The demo model, which can write words but has never seen JSON."""
    with Mesh(module_pool_dir, model=find_model("").path, deterministic=True) as made:
        yield made
        made.wait_idle()


def model_of(client: OpenAI) -> str:
    return client.models.list().data[0].id


def checked(text: str | None) -> dict[str, Any]:
    """``text`` as a person. Raises unless it is valid under ``PERSON``."""
    made: dict[str, Any] = json.loads(text or "")
    assert set(made) == {"name", "age", "tags"}
    assert isinstance(made["name"], str) and len(made["name"]) <= 20
    assert type(made["age"]) is int and 0 <= made["age"] <= 120
    assert set(made["tags"]) <= {"a", "b", "c"} and len(made["tags"]) <= 3
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_every_choice_is_valid_under_the_schema(client: OpenAI, temperature: float) -> None:
    answer = client.chat.completions.create(
        model=model_of(client), messages=[STORY], response_format=schema(), n=4, seed=7,
        temperature=temperature, max_tokens=300,
    )  # fmt: skip
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
    made = [checked(choice.message.content) for choice in answer.choices]
    assert temperature == 0.0 or len({json.dumps(one) for one in made}) > 1


def test_a_stream_has_the_same_tokens_and_scores_of_the_model_itself(client: OpenAI) -> None:
    model, text = model_of(client), ""
    whole = client.chat.completions.create(
        model=model, messages=[STORY], response_format=schema(), temperature=0.0, max_tokens=300,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    chunks = client.chat.completions.create(
        model=model, messages=[STORY], response_format=schema(), temperature=0.0, max_tokens=300,
        stream=True,
    )  # fmt: skip
    for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
    assert text == whole.choices[0].message.content
    scores = whole.choices[0].logprobs
    assert scores is not None and scores.content is not None
    first = scores.content[0]
    assert first.token not in {one.token for one in first.top_logprobs}, "it would never begin so"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
        ({"choice": ["yes", "no", "perhaps not"]}, "yes|no|perhaps not"),
        ({"grammar": 'start: "Once " WORD "."\nWORD: /[a-z]{3,8}/'}, r"Once [a-z]{3,8}\."),
        ({"json": {"type": "array", "items": {"type": "null"}, "maxItems": 2}}, r"\[[\snul,]*\]"),
    ],
)
def test_completions_take_them_too(client: OpenAI, fields: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(
        model=model_of(client), prompt=["Once", "A lamp"], max_tokens=60, temperature=1.0,
        extra_body={"structured_outputs": fields, "best_of": 2},
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and re.fullmatch(pattern, choice.text), choice.text


def test_json_mode_and_a_limit_that_cuts_it_short(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=model_of(client), messages=[STORY], response_format={"type": "json_object"},
        max_tokens=10, temperature=0.0,
    )  # fmt: skip
    [choice] = answer.choices
    assert choice.finish_reason == "length" and (choice.message.content or "").startswith("{")


def test_what_cannot_be_followed_is_a_bad_request_and_harms_nobody(client: OpenAI) -> None:
    model = model_of(client)
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(
            model=model, messages=[STORY], response_format=schema({"type": "objekt"})
        )
    assert caught.value.param == "response_format"
    # Only a worker knows which special tokens there are.
    with pytest.raises(BadRequestError, match="the grammar cannot be followed") as caught:
        client.chat.completions.create(
            model=model, messages=[STORY],
            extra_body={"structured_outputs": {"grammar": "start: <|no_such_token|>"}},
        )  # fmt: skip
    assert caught.value.code == "invalid_grammar"
    answer = client.chat.completions.create(model=model, messages=[STORY], max_tokens=4)
    assert answer.usage is not None and answer.usage.completion_tokens == 4


@pytest.mark.parametrize("role", ["prefill", "decode", "pager"])
def test_a_kill_changes_no_answer(module_pool_dir: Path, mesh: Mesh, role: str) -> None:
    """Others take answers over in the middle of their grammar."""
    words = {
        "type": "array", "items": {"type": "string", "minLength": 40, "maxLength": 60},
        "minItems": 12, "maxItems": 12,
    }  # fmt: skip

    model = find_model("").path.name

    async def ask(client: AsyncOpenAI, seed: int, flowing: asyncio.Event) -> str:
        text = ""
        stream = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": f"Tell me {seed} stories."}],
            response_format=schema(words), stream=True, max_tokens=900, seed=seed,
        )  # fmt: skip
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if len(text) > 100:
                flowing.set()
        made = json.loads(text)
        assert len(made) == 12 and all(40 <= len(one) <= 60 for one in made)
        return text

    async def ask_all(strike: bool) -> list[str]:
        url = f"{mesh.url}/v1"
        flowing = asyncio.Event()
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=90) as client:
            tasks = [asyncio.create_task(ask(client, seed, flowing)) for seed in range(4)]
            if strike:
                await asyncio.wait_for(flowing.wait(), 60)
                assert not all(task.done() for task in tasks), "nothing is left to be hurt"
                mesh.kill(role)
            return await asyncio.gather(*tasks)

    calm = asyncio.run(ask_all(strike=False))
    hurt = asyncio.run(ask_all(strike=True))
    mesh.wait_ready()
    assert hurt == calm
