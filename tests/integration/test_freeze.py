"""SIGSTOP of a service, never continued: it is killed and replaced, and every stream goes on."""

from __future__ import annotations

import asyncio
import functools
import signal
from pathlib import Path

import psutil
import pytest
from tests.integration.mesh import Mesh
from tests.integration.test_kill import check_unhurt, prompts_of, run_all

SILENCE_MS_MAX = 3_000


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["decode", "pager", "prefill"])
def test_every_stream_survives_a_service_that_stays_frozen(
    pool_dir: Path, tiny_model: Path, victim: str
) -> None:
    prompts = prompts_of(7)
    flags = ("--silence-ms-max", str(SILENCE_MS_MAX))
    with Mesh(
        pool_dir, model=tiny_model, deterministic=True, pool_bytes=32 << 20, flags=flags
    ) as mesh:
        frozen = mesh.pid(victim)
        freeze = functools.partial(mesh.kill, victim, number=signal.SIGSTOP)
        hurt = asyncio.run(run_all(mesh, prompts, freeze))
        mesh.wait_for(lambda: mesh.pid(victim) != frozen, f"another {victim}")
        assert not psutil.pid_exists(frozen), "it would hold its locks and its memory"
        assert "no sign of life for 3 s; killed" in mesh.log
        mesh.wait_ready()
        mesh.wait_idle()
        calm = asyncio.run(run_all(mesh, prompts))
        check_unhurt(hurt, calm, f"the freeze of {victim}")
        mesh.wait_idle()


@pytest.mark.slow
def test_a_frozen_nats_server_is_replaced(pool_dir: Path, tiny_model: Path) -> None:
    with Mesh(pool_dir, model=tiny_model, flags=("--silence-ms-max", "3000")) as mesh:
        frozen = mesh.kill("nats", number=signal.SIGSTOP)
        mesh.wait_for(lambda: mesh.pid("nats") != frozen, "another server")
        mesh.wait_ready()
        mesh.wait_idle()
