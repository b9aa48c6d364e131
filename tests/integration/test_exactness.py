"""Whatever way a request takes through the mesh, its tokens are the same, and right."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.exact import Answer, Reference, answers, asks_for, mixed_prompts, same
from tests.integration.mesh import Mesh

MODEL = "tiny"
VOCAB_TOKENS = 256
PROMPT_COUNT = 200
LENGTH_MAX = 600
GAP_MAX = 1e-4
PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4
"""Slots, K and V, layers, KV heads, head size, float32: a page of the tiny model."""
SMALL_POOL_PAGES = 64
"""The longest sequence takes 43 of them, while 16 requests are under way."""
ROUNDS_MAX = 5
"""Who meets whom in a small pool is chance: of 200 requests 1 to 25 are preempted, seldom none."""


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    return mixed_prompts(PROMPT_COUNT, VOCAB_TOKENS, length_max=LENGTH_MAX)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


def assert_greedy(reference: Reference, prompts: list[tuple[int, ...]], got: list[Answer]) -> None:
    for prompt, answer in zip(prompts, got, strict=True):
        for tokens in answer.tokens:
            assert reference.worst_gap(prompt, tokens) <= GAP_MAX


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_every_way_gives_the_same_bits_in_deterministic_mode(
    pool_dir: Path, tiny_model: Path, prompts: list[tuple[int, ...]], reference: Reference
) -> None:
    plain, salted = asks_for(prompts), asks_for(prompts, salted=True)
    with Mesh(pool_dir, model=tiny_model, deterministic=True, pool_bytes=32 << 20) as mesh:
        cold = answers(mesh, MODEL, salted)
        assert sum(answer.cached_tokens for answer in cold) == 0
        warm = answers(mesh, MODEL, plain)
        hot = answers(mesh, MODEL, plain)
        assert sum(answer.cached_tokens for answer in warm) > 10_000
        assert sum(a.cached_tokens for a in hot) > sum(a.cached_tokens for a in warm)
        forked = answers(mesh, MODEL, asks_for(prompts, choice_count=4))
        mesh.wait_idle()
    assert same(cold, warm)
    assert same(cold, hot)
    for one, four in zip(cold, forked, strict=True):
        assert (four.tokens, four.logprobs) == (one.tokens * 4, one.logprobs * 4)
    assert_greedy(reference, prompts, cold)

    chunked = {"PAGEMESH_STEP_TOKENS_MAX": "48"}
    with Mesh(
        pool_dir,
        model=tiny_model,
        deterministic=True,
        pool_bytes=32 << 20,
        handover=True,
        env=chunked,
    ) as mesh:
        assert same(cold, answers(mesh, MODEL, plain)), "small chunks, all handed over"

    small = PAGE_BYTES * SMALL_POOL_PAGES
    for handover in (True, False):
        with Mesh(
            pool_dir, model=tiny_model, deterministic=True, pool_bytes=small, handover=handover
        ) as mesh:
            for _ in range(ROUNDS_MAX):
                assert same(cold, answers(mesh, MODEL, plain)), f"under preemption, {handover=}"
                report = mesh.wait_idle()
                if report.preempted_count:
                    break
            assert report.total_pages == SMALL_POOL_PAGES
            assert report.preempted_count > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_greedy_token_is_valid_in_fast_mode(
    pool_dir: Path, tiny_model: Path, prompts: list[tuple[int, ...]], reference: Reference
) -> None:
    small = PAGE_BYTES * SMALL_POOL_PAGES
    for pool_bytes, handover in ((32 << 20, True), (small, False)):
        with Mesh(pool_dir, model=tiny_model, pool_bytes=pool_bytes, handover=handover) as mesh:
            for _ in range(2):
                assert_greedy(reference, prompts, answers(mesh, MODEL, asks_for(prompts)))
            mesh.wait_idle()
