"""A whole mesh serves a model that runs on the modules of ``transformers``."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.exact import Reference, answers, asks_for, mixed_prompts
from tests.integration.mesh import Mesh
from tests.integration.tiny_model import write_tiny_gemma2

WINDOW_TOKENS = 64
PROMPT_COUNT = 40
LENGTH_MAX = 400
GAP_MAX = 1e-4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_gemma_like_model_gives_valid_tokens_computed_handed_over_and_from_the_cache(
    pool_dir: Path, tmp_path: Path
) -> None:
    folder = write_tiny_gemma2(tmp_path / "gemma", window_tokens=WINDOW_TOKENS)
    prompts = mixed_prompts(PROMPT_COUNT, 256, length_max=LENGTH_MAX)
    assert max(map(len, prompts)) > 4 * WINDOW_TOKENS
    chunked = {"PAGEMESH_STEP_TOKENS_MAX": "96"}
    with Mesh(pool_dir, model=folder, env=chunked, pool_bytes=32 << 20, handover=True) as mesh:
        rounds = [answers(mesh, "gemma", asks_for(prompts)) for _ in range(2)]
        mesh.wait_idle()
    assert sum(answer.cached_tokens for answer in rounds[1]) > PROMPT_COUNT * 16
    reference = Reference(folder)
    for got in rounds:
        for prompt, answer in zip(prompts, got, strict=True):
            for tokens in answer.tokens:
                assert reference.worst_gap(prompt, tokens) <= GAP_MAX
