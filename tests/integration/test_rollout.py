"""Workers are replaced by a later version of the model, one after the other, while clients stream:
every answer is of one version, from its first token to its last."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.integration.mesh import Mesh
from tests.integration.test_kill import OUTPUT_TOKENS, Stream, prompts_of, run_all

CHANGED = "model.layers.0.self_attn.v_proj.weight"


def put_later_version(folder: Path) -> None:
    """As a deployment does: another file of the same name."""
    path, other = folder / "model.safetensors", folder / "other"
    tensors = load_file(path)
    tensors[CHANGED] = tensors[CHANGED].flip(0)
    save_file(tensors, other, metadata={"format": "pt"})
    other.replace(path)


def tokens_of(streams: list[Stream]) -> list[list[int]]:
    assert all(stream.done and len(stream.tokens) == OUTPUT_TOKENS for stream in streams)
    return [stream.tokens for stream in streams]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_answers_that_flow_while_workers_are_replaced_are_each_of_one_version(
    pool_dir: Path, tmp_path: Path, tiny_model: Path
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_model, folder)
    prompts = prompts_of(8)

    def begin_rollout() -> None:
        mesh.kill("prefill")
        mesh.kill("decode", 1)

    with Mesh(
        pool_dir, model=folder, decode=2, deterministic=True, pool_bytes=32 << 20, handover=True
    ) as mesh:
        old = tokens_of(asyncio.run(run_all(mesh, prompts)))
        put_later_version(folder)
        during = tokens_of(asyncio.run(run_all(mesh, prompts, begin_rollout)))
        mesh.wait_for(lambda: len(mesh.report().workers) == 3, "both versions")
        both = tokens_of(asyncio.run(run_all(mesh, prompts)))
        left = mesh.kill("decode", 0)
        mesh.wait_for(lambda: mesh.pid("decode", 0) != left, "the last of the later version")
        mesh.wait_for(lambda: len(mesh.report().workers) == 3, "all of the later version")
        mesh.wait_ready()
        new = tokens_of(asyncio.run(run_all(mesh, prompts)))
        mesh.wait_idle()
    assert not any(one == other for one, other in zip(old, new, strict=True)), "weights decide"
    for index, answers in enumerate(zip(during, both, strict=True)):
        for answer in answers:
            assert answer in (old[index], new[index]), f"stream {index} is of neither version"
