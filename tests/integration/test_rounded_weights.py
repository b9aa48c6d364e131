"""A mesh whose models are rounded answers as one process that does so, whatever way."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.exact import answers_every_way, mixed_prompts
from tests.integration.mesh import Mesh
from tests.integration.one_process import OneProcess

from pagemesh.kernels.weight_types import AskedType

MODEL = "tiny"
VOCAB_TOKENS = 256


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("weight_type", ["int8", "bfloat16"])
def test_rounded_weights_give_the_same_bits_cold_warm_after_a_kill_and_in_one_process(
    pool_dir: Path, tmp_path: Path, tiny_model: Path, weight_type: AskedType
) -> None:
    prompts = mixed_prompts(40, VOCAB_TOKENS, length_max=300)
    flags = ("--dtype", weight_type)
    with Mesh(pool_dir, model=tiny_model, deterministic=True, flags=flags) as mesh:
        cold = answers_every_way(mesh, MODEL, prompts, cached_tokens_min=3_000)
    same = {"rounded": 0, "exact": 0}
    rounded = OneProcess(tiny_model, tmp_path / "cache", weight_type=weight_type)
    exact = OneProcess(tiny_model, tmp_path / "cache")
    for prompt, answer in zip(prompts, cold, strict=True):
        [tokens] = answer.tokens
        same["rounded"] += rounded.greedy(prompt, tokens) == tokens
        same["exact"] += exact.greedy(prompt, tokens) == tokens
    assert same["rounded"] == len(prompts)
    assert same["exact"] < len(prompts), "other weights, so other tokens now and then"
