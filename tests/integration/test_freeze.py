"""SIGSTOP of a service, never continued: it is killed and replaced, and every stream goes on."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.mesh import Mesh
from tests.integration.test_kill import check_unhurt, prompts_of, run_all

pytestmark = pytest.mark.slow
SILENCE_MS_MAX = 3_000
KILLED = "no sign of life for 3 s; killed"


@pytest.fixture(scope="module")
def mesh(module_pool_dir: Path, tiny_model: Path) -> Iterator[Mesh]:
    flags = ("--silence-ms-max", str(SILENCE_MS_MAX))
    with Mesh(
        module_pool_dir,
        model=tiny_model,
        deterministic=True,
        pool_bytes=32 << 20,
        handover=True,
        flags=flags,
    ) as made:
        yield made


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victim", "seed"), [("decode", 7), ("pager", 8), ("prefill", 9)])
def test_every_stream_survives_a_service_that_stays_frozen(
    mesh: Mesh, victim: str, seed: int
) -> None:
    prompts = prompts_of(seed)
    frozen = mesh.pid(victim)
    said_count = mesh.log.count(KILLED)
    freeze = functools.partial(mesh.kill, victim, number=signal.SIGSTOP)
    hurt = asyncio.run(run_all(mesh, prompts, freeze))
    mesh.wait_for(lambda: mesh.pid(victim) != frozen, f"another {victim}")
    assert not psutil.pid_exists(frozen), "it would hold its locks and its memory"
    assert mesh.log.count(KILLED) == said_count + 1
    mesh.wait_ready()
    mesh.wait_idle()
    calm = asyncio.run(run_all(mesh, prompts))
    check_unhurt(hurt, calm, f"the freeze of {victim}")
    mesh.wait_idle()


def test_a_frozen_nats_server_is_replaced(mesh: Mesh) -> None:
    frozen = mesh.kill("nats", number=signal.SIGSTOP)
    mesh.wait_for(lambda: mesh.pid("nats") != frozen, "another server")
    mesh.wait_ready()
    mesh.wait_idle()
