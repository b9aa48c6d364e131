"""A mesh whose models are kept as int8 answers as one process that does so, whatever way."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.exact import answers_every_way, mixed_prompts
from tests.integration.mesh import Mesh
from tests.integration.one_process import OneProcess

MODEL = "tiny"
VOCAB_TOKENS = 256


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_int8_weights_give_the_same_bits_cold_warm_after_a_kill_and_in_one_process(
    pool_dir: Path, tmp_path: Path, tiny_model: Path
) -> None:
    prompts = mixed_prompts(40, VOCAB_TOKENS, length_max=300)
    flags = ("--dtype", "int8")
    with Mesh(pool_dir, model=tiny_model, deterministic=True, flags=flags) as mesh:
        cold = answers_every_way(mesh, MODEL, prompts, cached_tokens_min=3_000)
    same = {"int8": 0, "float32": 0}
    int8 = OneProcess(tiny_model, tmp_path / "cache", weight_type="int8")
    float32 = OneProcess(tiny_model, tmp_path / "cache")
    for prompt, answer in zip(prompts, cold, strict=True):
        [tokens] = answer.tokens
        same["int8"] += int8.greedy(prompt, tokens) == tokens
        same["float32"] += float32.greedy(prompt, tokens) == tokens
    assert same["int8"] == len(prompts)
    assert same["float32"] < len(prompts), "other weights, so other tokens now and then"
