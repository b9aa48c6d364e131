"""Prompts, answers and a reference for tests of exactness.

The same 200 requests go through the mesh in different ways; an ``Answer`` is the result.
``worst_gap`` computes with ``transformers`` how far each greedy token's logit is below the maximum
for the same context.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.integration.mesh import Mesh

CONCURRENCY = 16
OUTPUT_TOKENS = 8
LONG_OUTPUT_TOKENS = 72
"""Length of every fourth answer: it grows by several pages, so that a full pool must revoke
some."""
FAMILY_COUNT = 12
"""Number of families of prompts; those of a family share a prefix, so that there are cache hits."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: token ids in, greedy tokens out."""

    prompt: tuple[int, ...]
    output_tokens: int
    choice_count: int = 1
    salt: str = ""
    """Requests with different salts share no pages."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of each choice with their log-probabilities, and the number of cached tokens."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    cached_tokens: int


def mixed_prompts(
    count: int, vocab_tokens: int, *, length_max: int, seed: int = 7
) -> list[tuple[int, ...]]:
    """``count`` prompts of 1 to ``length_max`` random tokens, many with a common prefix."""
    draw = random.Random(seed)
    stems = [
        tuple(draw.randrange(vocab_tokens) for _ in range(draw.randrange(20, length_max * 2 // 3)))
        for _ in range(FAMILY_COUNT)
    ]
    prompts = []
    for index in range(count):
        stem = stems[index % FAMILY_COUNT] if index % 4 else ()
        length = draw.randrange(1, length_max // 3)
        prompts.append(stem + tuple(draw.randrange(vocab_tokens) for _ in range(length)))
    return prompts


def asks_for(
    prompts: list[tuple[int, ...]], *, choice_count: int = 1, salted: bool = False
) -> list[Ask]:
    """A request for each prompt; ``salted`` keeps each in a prefix tree of its own."""
    return [
        Ask(
            prompt,
            OUTPUT_TOKENS if index % 4 else LONG_OUTPUT_TOKENS,
            choice_count,
            f"alone-{index}" if salted else "",
        )
        for index, prompt in enumerate(prompts)
    ]


async def _one(client: httpx.AsyncClient, model: str, ask: Ask) -> Answer:
    body: dict[str, Any] = {
        "model": model, "prompt": list(ask.prompt), "max_tokens": ask.output_tokens,
        "temperature": 0, "logprobs": 1, "n": ask.choice_count, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    if ask.salt:
        body["cache_salt"] = ask.salt
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    assert len(choices) == ask.choice_count
    assert all(len(choice["token_ids"]) == ask.output_tokens for choice in choices)
    details = answer["usage"]["prompt_tokens_details"]
    return Answer(
        tokens=tuple(tuple(choice["token_ids"]) for choice in choices),
        logprobs=tuple(tuple(choice["logprobs"]["token_logprobs"]) for choice in choices),
        cached_tokens=details["cached_tokens"],
    )


async def _all(url: str, model: str, asks: list[Ask]) -> list[Answer]:
    gate = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:

        async def guarded(ask: Ask) -> Answer:
            async with gate:
                return await _one(client, model, ask)

        return await asyncio.gather(*(guarded(ask) for ask in asks))


def answers(mesh: Mesh, model: str, asks: list[Ask]) -> list[Answer]:
    """The answers in the order of ``asks``, requested ``CONCURRENCY`` at a time."""
    return asyncio.run(_all(mesh.url, model, asks))


def same(left: list[Answer], right: list[Answer]) -> bool:
    """Whether tokens are equal, and log-probabilities equal to the last bit."""
    return [(a.tokens, a.logprobs) for a in left] == [(b.tokens, b.logprobs) for b in right]


def answers_every_way(
    mesh: Mesh, model: str, prompts: list[tuple[int, ...]], *, cached_tokens_min: int
) -> list[Answer]:
    """Answers that must be bit for bit the same cold, warm, from the cache and after the death of
    decode. Raises ``AssertionError`` if they differ, or did not come from where they should."""
    cold = answers(mesh, model, asks_for(prompts, salted=True))
    plain = asks_for(prompts)
    warm = answers(mesh, model, plain)
    hot = answers(mesh, model, plain)
    assert sum(answer.cached_tokens for answer in cold) == 0
    assert sum(answer.cached_tokens for answer in hot) > cached_tokens_min
    old = mesh.kill("decode")
    mesh.wait_for(lambda: mesh.pid("decode") != old, "a new decode")
    mesh.wait_ready()
    after = answers(mesh, model, plain)
    mesh.wait_idle()
    assert same(cold, warm)
    assert same(cold, hot)
    assert same(cold, after)
    return cold


class Reference:
    """``transformers`` on the same weights in float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model = model.eval()
        self._gaps: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def worst_gap(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> float:
        """The largest distance of the logit of one of ``tokens`` to the maximum."""
        asked = prompt, tokens
        if asked not in self._gaps:
            self._gaps[asked] = self._computed_gap(prompt, tokens)
        return self._gaps[asked]

    def _computed_gap(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> float:
        torch = self._torch
        with torch.no_grad():
            context = torch.tensor([[*prompt, *tokens[:-1]]])
            logits = self._model(context).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return float((logits.max(dim=1).values - chosen).max())
