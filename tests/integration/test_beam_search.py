"""Beam search over HTTP, from prefill to decode: the answers of ``transformers``, whatever
happens on the way."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.integration.mesh import Mesh

from pagemesh.runtime.model_folder import DEMO_NAME, find_model

TEXTS = (
    "Once upon a time there was a little",
    "The dog and the cat went to the river, and there they saw a boat. " * 8,
)
WIDTH, KEEP, MAX_TOKENS = 5, 3, 40


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    score: float
    """The sum of its log-probabilities, by token."""


def body_of(prompt: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": DEMO_NAME, "prompt": prompt, "use_beam_search": True, "n": KEEP,
        "best_of": WIDTH, "max_tokens": MAX_TOKENS, "logprobs": 0, "return_token_ids": True,
        "include_stop_str_in_output": True, **fields,
    }  # fmt: skip


def answers_of(response: httpx.Response) -> list[Answer]:
    assert response.status_code == 200, response.text
    found = []
    for choice in response.json()["choices"]:
        scores = choice["logprobs"]["token_logprobs"]
        assert len(scores) == len(choice["token_ids"])
        found.append(Answer(choice["token_ids"], sum(scores) / len(scores)))
    return found


def by_transformers(ids: list[int]) -> list[Answer]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(find_model("").path, dtype=torch.float32)
    ends = model.generation_config.eos_token_id
    stops = ends if isinstance(ends, list) else [ends]
    prompt = torch.tensor([ids])
    found = model.eval().generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, num_beams=WIDTH,
        num_return_sequences=KEEP, max_new_tokens=MAX_TOKENS, pad_token_id=0,
        eos_token_id=stops, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    out = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores, strict=True):
        tokens = row[len(ids) :]
        cut = [at for at, token in enumerate(tokens) if token in stops]
        out.append(Answer(tokens[: cut[0] + 1] if cut else tokens, float(score)))
    return out


async def _together(url: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=one) for one in bodies))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_beam_search_over_http_finds_what_transformers_finds(pool_dir: Path) -> None:
    with Mesh(pool_dir, deterministic=True) as mesh:
        cold = asyncio.run(_together(mesh.url, [body_of(text) for text in TEXTS]))
        for response in cold:
            got = answers_of(response)
            right = by_transformers(response.json()["choices"][0]["prompt_token_ids"])
            assert [one.tokens for one in got] == [one.tokens for one in right]
            for one, other in zip(got, right, strict=True):
                assert one.score == pytest.approx(other.score, abs=1e-4)
        # Beside others that draw, from the cache, and with pages of many beams in the pool.
        plain = [body_of("x", use_beam_search=False, best_of=4, temperature=1.0)] * 4
        mixed = asyncio.run(_together(mesh.url, [body_of(text) for text in TEXTS] + plain))
        assert [answers_of(one) for one in mixed[:2]] == [answers_of(one) for one in cold]
        usage = mixed[1].json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"]
        mesh.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_beam_search_survives_the_death_of_whoever_searches(pool_dir: Path) -> None:
    body = body_of(TEXTS[1], max_tokens=400, ignore_eos=True, best_of=8)
    with Mesh(pool_dir, deterministic=True, pool_bytes=32 << 20) as mesh:
        began_s = time.monotonic()
        calm = answers_of(asyncio.run(_together(mesh.url, [body]))[0])
        calm_s = time.monotonic() - began_s

        async def hurt() -> httpx.Response:
            task = asyncio.create_task(_together(mesh.url, [body]))
            await asyncio.sleep(0.4 * calm_s)
            assert not task.done(), "it was over before the kill"
            await asyncio.to_thread(mesh.kill, "decode")
            return (await task)[0]

        assert answers_of(asyncio.run(hurt())) == calm
        mesh.wait_idle()
