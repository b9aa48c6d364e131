"""What comes from the cache is counted exactly, and is all that could have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.mesh import Mesh

PAGE_SIZE = 16


def post(mesh: Mesh, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{mesh.url}{path}", json={"temperature": 0, **body}, timeout=60.0)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


@pytest.mark.slow
def test_a_repeated_prompt_is_cached_but_for_the_page_that_must_be_computed(
    pool_dir: Path, tiny_model: Path
) -> None:
    def ask(prompt: list[int]) -> int:
        return cached(post(mesh, "/v1/completions", {"model": "tiny", "prompt": prompt}))

    with Mesh(pool_dir, model=tiny_model) as mesh:
        prompt = [index * 7 % 256 for index in range(1_024)]
        assert ask(prompt) == 0
        assert ask(prompt) == 1_024 - PAGE_SIZE, "the last token's page gives the logits"
        assert ask([*prompt, 5]) == 1_024
        changed = [*prompt]
        changed[500] += 1
        assert ask(changed) == 500 // PAGE_SIZE * PAGE_SIZE


@pytest.mark.slow
def test_a_second_turn_hits_the_pages_of_the_first_answer(pool_dir: Path) -> None:
    """On the demo model, whose answers are text that reads back as the same tokens."""
    with Mesh(pool_dir, pool_bytes=64 << 20) as mesh:
        talk = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]
        body = {"model": "pagemesh-demo", "messages": talk, "max_tokens": 120}
        first = post(mesh, "/v1/chat/completions", body)
        talk.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
        talk.append({"role": "user", "content": "And then?"})
        second = post(mesh, "/v1/chat/completions", body)
    usage = first["usage"]
    known = usage["prompt_tokens"] + usage["completion_tokens"]
    # The last drawn token's own K and V were never written, and only full pages are kept.
    assert cached(second) >= (known - 1) // PAGE_SIZE * PAGE_SIZE
    assert cached(second) > usage["prompt_tokens"] + PAGE_SIZE
