"""kill -9 of any one service under load: every stream goes on to the same end."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from tests.integration.mesh import Mesh

from pagemesh.cli.mesh.run_folder import running_urls

MODEL = "tiny"
STREAM_COUNT = 24
OUTPUT_TOKENS = 960  # most of a second, so that a fault finds streams on their way
PROMPT_TOKENS_MAX = 200
TOKENS_BEFORE_KILL = 12


@dataclass(slots=True)
class Stream:
    """What one client saw."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    done: bool = False


async def follow(
    client: httpx.AsyncClient, prompt: list[int], stream: Stream, on_tokens: Callable[[], None]
) -> None:
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                stream.done = True
            elif line.startswith("data: "):
                [choice] = json.loads(line[6:])["choices"]
                stream.tokens += choice.get("token_ids") or []
                stream.finish = choice["finish_reason"] or stream.finish
                on_tokens()


async def run_all(
    mesh: Mesh, prompts: list[list[int]], strike: Callable[[], object] | None = None
) -> list[Stream]:
    """All prompts at once; ``strike`` is called when half of the streams flow."""
    streams, flowing = [Stream() for _ in prompts], asyncio.Event()

    def on_tokens() -> None:
        if sum(len(s.tokens) >= TOKENS_BEFORE_KILL for s in streams) >= len(streams) // 2:
            flowing.set()

    async with (
        httpx.AsyncClient(base_url=mesh.url, timeout=90.0) as client,
        asyncio.TaskGroup() as group,
    ):
        for prompt, stream in zip(prompts, streams, strict=True):
            group.create_task(follow(client, prompt, stream, on_tokens))
        if strike is not None:
            await flowing.wait()
            assert not all(stream.done for stream in streams), "nothing is left to be hurt"
            strike()
    return streams


def check_unhurt(hurt: list[Stream], calm: list[Stream], fault: str) -> None:
    """Every stream that met ``fault`` came to its end with the tokens it has without."""
    for index, (one, other) in enumerate(zip(hurt, calm, strict=True)):
        where = f"stream {index} after {fault}"
        assert one.done and one.finish == "length", where
        assert len(one.tokens) == OUTPUT_TOKENS, where
        assert one.tokens == other.tokens, where


def prompts_of(seed: int) -> list[list[int]]:
    """Prompts of mixed length; half share a beginning."""
    draw = random.Random(seed)
    stem = [draw.randrange(256) for _ in range(PROMPT_TOKENS_MAX // 2)]
    return [
        (stem if index % 2 else [])
        + [draw.randrange(256) for _ in range(draw.randrange(1, PROMPT_TOKENS_MAX // 2))]
        for index in range(STREAM_COUNT)
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("handover", "victims"), [(True, ("prefill", "decode", "pager")), (False, ("decode", "pager"))]
)
def test_every_stream_survives_the_death_of_a_service(
    pool_dir: Path, tiny_model: Path, handover: bool, victims: tuple[str, ...]
) -> None:
    with Mesh(
        pool_dir, model=tiny_model, deterministic=True, pool_bytes=32 << 20, handover=handover
    ) as mesh:
        for seed, victim in enumerate(victims):
            prompts = prompts_of(seed)
            hurt = asyncio.run(run_all(mesh, prompts, functools.partial(mesh.kill, victim)))
            mesh.wait_ready()
            mesh.wait_idle()
            calm = asyncio.run(run_all(mesh, prompts))
            check_unhurt(hurt, calm, f"kill -9 of {victim}")
            mesh.wait_idle()


DOORS = {"operator", "client", "gateway"}


def doors(mesh: Mesh) -> set[str]:
    """The users whose way to the mesh can be found on this machine."""
    return {user for user in DOORS if running_urls(mesh.pool_dir, user)}


def empty_folder(mesh: Mesh) -> None:
    """As systemd does with the shared memory of a user who has logged out; then those die that
    have to find something there when they start."""
    shutil.rmtree(mesh.pool_dir)
    mesh.kill("pager")
    mesh.kill("nats")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_stream_survives_that_somebody_empties_the_pool_folder(
    pool_dir: Path, tiny_model: Path
) -> None:
    with Mesh(pool_dir, model=tiny_model, deterministic=True, pool_bytes=32 << 20) as mesh:
        prompts = prompts_of(5)
        hurt = asyncio.run(run_all(mesh, prompts, functools.partial(empty_folder, mesh)))
        mesh.wait_for(lambda: len(list(mesh.pool_dir.rglob("worker-*.lock"))) == 2, "new locks")
        mesh.wait_ready()
        mesh.wait_idle()
        mesh.wait_for(lambda: doors(mesh) == DOORS, "its doors")
        calm = asyncio.run(run_all(mesh, prompts))
        check_unhurt(hurt, calm, "the loss of its files")
        mesh.wait_idle()


def stop_for_a_while(mesh: Mesh) -> None:
    pid = mesh.kill("pager", number=signal.SIGSTOP)
    time.sleep(3)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pager_that_was_stopped_for_longer_than_a_session_takes_nothing_back(
    pool_dir: Path, tiny_model: Path
) -> None:
    short = {"PAGEMESH_SESSION_TTL_MS": "1500"}
    with Mesh(pool_dir, model=tiny_model, pool_bytes=32 << 20, env=short) as mesh:
        asyncio.run(run_all(mesh, prompts_of(6), functools.partial(stop_for_a_while, mesh)))
        mesh.wait_idle()
        assert "session_expired" not in mesh.log
