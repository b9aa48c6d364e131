"""Lesser machines, on this one: a mesh with a single core, and one with plain AVX-512 (no BF16, no
tiles), with AVX2, with neither."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.integration.exact import (
    Reference,
    answers,
    answers_every_way,
    asks_for,
    mixed_prompts,
    same,
)
from tests.integration.mesh import Mesh
from tests.kernels.levels import EVERY_LEVEL

from pagemesh.kernels.native.library import ABI_VERSION, LEVEL_VARIABLE, CpuLevel

MODEL = "tiny"
VOCAB_TOKENS = 256
PROMPT_COUNT = 12
LENGTH_MAX = 400
GAP_MAX = 1e-4

LESSER = (CpuLevel.PORTABLE, CpuLevel.AVX2, CpuLevel.AVX512)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("level", [one for one in EVERY_LEVEL if one.values[0] in LESSER])
def test_one_core_of_a_lesser_level_gives_what_all_cores_do_whatever_way(
    pool_dir: Path, tiny_model: Path, level: CpuLevel
) -> None:
    prompts = mixed_prompts(PROMPT_COUNT, VOCAB_TOKENS, length_max=LENGTH_MAX)
    environ = {LEVEL_VARIABLE: level.name.lower(), "PAGEMESH_LOG_LEVEL": "info"}
    kernels = f"native-{ABI_VERSION}-{level.name.lower()}"
    core = min(os.sched_getaffinity(0))
    with Mesh(pool_dir, model=tiny_model, deterministic=True, env=environ, cores={core}) as mesh:
        assert mesh.log.count(kernels) == 2, "prefill and decode"
        alone = answers_every_way(mesh, MODEL, prompts, cached_tokens_min=1_000)
        assert mesh.cores() == {core}
    reference = Reference(tiny_model)
    for prompt, answer in zip(prompts, alone, strict=True):
        [tokens] = answer.tokens
        assert reference.worst_gap(prompt, tokens) <= GAP_MAX

    environ["PAGEMESH_STEP_TOKENS_MAX"] = "48"
    with Mesh(pool_dir, model=tiny_model, deterministic=True, env=environ, handover=True) as mesh:
        assert mesh.cores() >= os.sched_getaffinity(0)
        assert same(alone, answers(mesh, MODEL, asks_for(prompts))), "small chunks, all handed over"
        mesh.wait_idle()
