"""A mesh that keeps K and V in fewer bits answers as one process that does so."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.exact import answers_every_way, mixed_prompts
from tests.integration.mesh import Mesh
from tests.integration.one_process import PAGE_SIZE, OneProcess

from pagemesh.kernels.layout import KvDtype

MODEL = "tiny"
VOCAB_TOKENS = 256
ROW_BYTES: dict[KvDtype, int] = {
    "float16": 2 * 16, "bfloat16": 2 * 16, "int8": 16 + 4, "e4m3": 16 + 4,
}  # fmt: skip
"""A head's K or V of one token: codes, and their scale."""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kv_dtype", list(ROW_BYTES))
def test_narrow_kv_gives_the_same_tokens_cold_warm_after_a_kill_and_in_one_process(
    pool_dir: Path, tmp_path: Path, tiny_model: Path, kv_dtype: KvDtype
) -> None:
    prompts = mixed_prompts(40, VOCAB_TOKENS, length_max=300)
    flags = ("--kv-dtype", kv_dtype)
    with Mesh(pool_dir, model=tiny_model, deterministic=True, handover=True, flags=flags) as mesh:
        cold = answers_every_way(mesh, MODEL, prompts, cached_tokens_min=3_000)
        assert mesh.report().page_bytes == PAGE_SIZE * 2 * 2 * 2 * ROW_BYTES[kv_dtype]
    alone = OneProcess(tiny_model, tmp_path / "cache", kv_dtype=kv_dtype)
    for prompt, answer in zip(prompts, cold, strict=True):
        [tokens] = answer.tokens
        assert alone.greedy(prompt, tokens) == tokens
