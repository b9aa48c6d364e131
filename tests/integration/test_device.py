"""A whole mesh with its pages on a device: that of Triton's interpreter, so only a few tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.exact import Reference
from tests.integration.mesh import Mesh
from tests.integration.tiny_model import write_tiny_llama
from tests.support.pool_memories import memories

GAP_MAX = 1e-4
OUTPUT_TOKENS = 3
STEM = tuple(range(40, 60))
PROMPTS = ((*STEM, 7, 9), (*STEM, 8), (3, 5))


def choice_count(prompt: tuple[int, ...]) -> int:
    """One prompt forks, so that a page is copied."""
    return 2 if prompt == PROMPTS[0] else 1


def greedy(mesh: Mesh) -> list[dict[str, Any]]:
    """The answers to ``PROMPTS``, asked all at once."""

    async def ask(client: httpx.AsyncClient, prompt: tuple[int, ...]) -> dict[str, Any]:
        body = {
            "model": "tiny", "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS,
            "n": choice_count(prompt), "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def ask_all() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=mesh.url, timeout=250.0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))

    return asyncio.run(ask_all())


def cached(answers: list[dict[str, Any]]) -> int:
    return sum(one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in answers)


def require_exact(folder: Path, rounds: list[list[dict[str, Any]]]) -> None:
    reference = Reference(folder)
    for answers in rounds:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert len(answer["choices"]) == choice_count(prompt)
            for choice in answer["choices"]:
                tokens = tuple(choice["token_ids"])
                assert len(tokens) == OUTPUT_TOKENS
                assert reference.worst_gap(prompt, tokens) <= GAP_MAX


def handing_over(pool_dir: Path, model: Path) -> Mesh:
    """A mesh on a device whose prefill worker computes every prompt."""
    flags = ("--device", "interpreter")
    return Mesh(pool_dir, model=model, pool_bytes=4 << 20, handover=True, flags=flags)


def replace(mesh: Mesh, *roles: str) -> None:
    """Kill all of ``roles`` at once, and wait for those that follow them."""
    killed = {role: mesh.kill(role) for role in roles}
    mesh.wait_for(
        lambda: all(mesh.pid(role) != old for role, old in killed.items()), " and ".join(roles)
    )
    mesh.wait_ready(90.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tokens_are_those_of_the_cpu_and_pages_outlive_each_process_but_not_all(
    pool_dir: Path, tmp_path: Path, no_stray_processes: None
) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    with handing_over(pool_dir, folder) as mesh:
        rounds = [greedy(mesh), greedy(mesh)]
        assert cached(rounds[1]) > 0
        for role in ("decode", "pager"):
            replace(mesh, role)
            rounds.append(greedy(mesh))
            assert cached(rounds[-1]) >= cached(rounds[1]), f"{role} took no page with it"
        mesh.wait_idle(60.0)
        replace(mesh, "pager", "prefill", "decode")
        rounds.append(greedy(mesh))
        assert cached(rounds[-1]) < cached(rounds[1]), "the memory went with the last of them"
        mesh.wait_idle(60.0)
    require_exact(folder, rounds)
    assert not list(pool_dir.rglob("*.memory"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_cached_on_a_device_is_on_disk_when_the_mesh_is_stopped_and_comes_back(
    pool_dir: Path, tmp_path: Path, no_stray_processes: None
) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    flags = ("--device", "interpreter", "--disk-dir", str(tmp_path / "cold"))
    rounds = []
    for _ in range(2):
        with Mesh(pool_dir, model=folder, pool_bytes=4 << 20, flags=flags) as mesh:
            rounds.append(greedy(mesh))
            report = mesh.wait_idle(60.0)
            assert mesh.stop() == 0
    assert report.disk_slots and report.disk_pages
    assert cached(rounds[1]) > cached(rounds[0])
    require_exact(folder, rounds)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_a_pool_that_was_removed_no_process_keeps_the_memory(
    pool_dir: Path, tmp_path: Path, no_stray_processes: None
) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    with handing_over(pool_dir, folder) as mesh:

        def held() -> set[int]:
            return set().union(*map(memories, mesh.pids().values()))

        rounds = [greedy(mesh)]
        (old,) = held()
        for path in pool_dir.rglob("*.pool"):
            path.unlink()
        replace(mesh, "decode")
        # While a step goes on, which in the interpreter may take seconds, nobody lets go.
        mesh.wait_for(lambda: "pager.pool_removed" in mesh.log, "the pager to see that it is gone")
        rounds.append(greedy(mesh))
        # Who computed over it lets go of the last view a moment after the answer.
        mesh.wait_for(lambda: old not in held(), "the memory of the old pool to be let go")
        assert len(held()) == 1
        mesh.wait_idle(60.0)
    require_exact(folder, rounds)
    assert "pager.memory_not_let_go" not in mesh.log
