"""A step that never ends: its worker ends, is started again, and every stream goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.mesh import Mesh
from tests.integration.test_kill import check_unhurt, prompts_of, run_all

pytestmark = pytest.mark.slow
STEP_MS_MAX = 4_000
HUNG = "worker.step_hung"
KILLED = "no sign of life"


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """Where a file with the name of a role makes a step of that role hang, after as many as it
    says."""
    folder = tmp_path / "orders"
    folder.mkdir()
    return folder


@pytest.fixture
def mesh(pool_dir: Path, tiny_model: Path, orders: Path) -> Iterator[Mesh]:
    """One for each test: a worker that was started again may be left out for a while."""
    env = {"PYTHONPATH": str(Path(__file__).parent / "hanging"), "HANGING_STEPS": str(orders)}
    flags = ("--step-ms-max", str(STEP_MS_MAX))
    with Mesh(
        pool_dir,
        model=tiny_model,
        deterministic=True,
        pool_bytes=32 << 20,
        handover=True,
        env=env,
        flags=flags,
    ) as made:
        yield made


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("victim", "after_steps", "seed"),
    [("decode", 40, 11), ("decode", 0, 12), ("prefill", 1, 13)],
    ids=["decode, in the middle", "decode, at once", "prefill"],
)
def test_every_stream_survives_a_step_that_hangs(
    mesh: Mesh, orders: Path, victim: str, after_steps: int, seed: int
) -> None:
    prompts, order = prompts_of(seed), orders / victim
    hanging = mesh.pid(victim)
    order.with_suffix(".new").write_text(str(after_steps))
    order.with_suffix(".new").rename(order)
    mesh.wait_for(lambda: not order.exists(), "the order to be taken")
    began_s = time.monotonic()
    hurt = asyncio.run(run_all(mesh, prompts))
    spent_s = time.monotonic() - began_s
    mesh.wait_for(lambda: mesh.pid(victim) != hanging, f"another {victim}")
    assert not psutil.pid_exists(hanging)
    assert mesh.log.count(HUNG) == 1, mesh.log[-4_000:]
    assert KILLED not in mesh.log, "its event loop went on beating"
    assert spent_s > STEP_MS_MAX / 1_000, "until then it may have been a long step"
    mesh.wait_ready()
    mesh.wait_idle()
    calm = asyncio.run(run_all(mesh, prompts))
    check_unhurt(hurt, calm, f"a hung step of {victim}")
    mesh.wait_idle()


@pytest.mark.timeout(300)
def test_a_second_signal_does_not_wait_for_a_step_and_every_stream_survives_it(
    mesh: Mesh, orders: Path
) -> None:
    prompts, order, ended_s = prompts_of(14), orders / "decode", list[float]()
    victim = mesh.pid("decode")

    def strike() -> None:
        order.with_suffix(".new").write_text("0")
        order.with_suffix(".new").rename(order)
        mesh.wait_for(lambda: not order.exists(), "the order to be taken")
        os.kill(victim, signal.SIGTERM)
        time.sleep(0.3)
        began_s = time.monotonic()
        os.kill(victim, signal.SIGTERM)
        mesh.wait_for(lambda: not psutil.pid_exists(victim), "its end")
        ended_s.append(time.monotonic() - began_s)

    hurt = asyncio.run(run_all(mesh, prompts, strike))
    assert ended_s[0] < STEP_MS_MAX / 2_000
    assert "service.cut_off" in mesh.log and HUNG not in mesh.log
    mesh.wait_ready()
    mesh.wait_idle()
    calm = asyncio.run(run_all(mesh, prompts))
    check_unhurt(hurt, calm, "a second signal")
    mesh.wait_idle()
