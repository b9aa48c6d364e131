"""Workers that come back with other weights under the same name read no page of the old ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file
from tests.integration.mesh import Mesh
from tests.integration.one_process import OneProcess

PROMPT = tuple(index * 7 % 256 for index in range(300))
FULL_TOKENS = 288
CHANGED = "model.layers.0.self_attn.v_proj.weight"
Asked = tuple[int, tuple[int, ...]]


def ask(mesh: Mesh) -> Asked:
    """How many tokens of the prompt were cached, and the answer."""
    body = {
        "model": "tiny", "prompt": list(PROMPT), "max_tokens": 12, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    cached: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, tuple(found["choices"][0]["token_ids"])


def change_one_weight(folder: Path, by: float) -> None:
    """In the file that is there, which keeps its size and its time of modification."""
    path, other = folder / "model.safetensors", folder / "other"
    before = path.stat()
    tensors = load_file(path)
    tensors[CHANGED][0, 0] += by
    save_file(tensors, other, metadata={"format": "pt"})
    with path.open("r+b") as file:  # workers have it mapped
        file.write(other.read_bytes())
    other.unlink()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def restart(mesh: Mesh, *roles: str) -> None:
    """kill -9, and wait until the successors of all of them serve."""
    old = {role: mesh.kill(role) for role in roles}
    mesh.wait_for(lambda: all(mesh.pid(role) != old[role] for role in roles), "their successors")
    mesh.wait_for(lambda: len(mesh.report().workers) == 2, "both workers at the pager")
    mesh.wait_ready()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_whatever_is_restarted_each_answer_is_of_one_set_of_weights_and_reads_its_pages_only(
    pool_dir: Path, tmp_path: Path, tiny_model: Path
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_model, folder)
    with Mesh(pool_dir, model=folder, deterministic=True) as mesh:
        cached, old = ask(mesh)
        assert cached == 0 and ask(mesh) == (FULL_TOKENS, old)
        change_one_weight(folder, 4.0)
        restart(mesh, "prefill")
        mixed = [ask(mesh) for _ in range(6)]  # two roots are served under one name
        restart(mesh, "decode", "prefill")
        after, new = ask(mesh)
        assert new != old, "the weight decides"
        assert ask(mesh) == (FULL_TOKENS, new)
        firsts = [*[tokens for _, tokens in mixed], new]
        assert after == (FULL_TOKENS if firsts.index(new) < len(mixed) else 0)
        for at, (count, tokens) in enumerate(mixed):
            assert tokens in {old, new}, "an answer of neither"
            known = tokens == old or tokens in firsts[:at]
            assert count == (FULL_TOKENS if known else 0), "cached by whom?"
        mesh.wait_idle()
    alone = OneProcess(folder, tmp_path / "fresh")
    assert alone.greedy(PROMPT, new) == new
