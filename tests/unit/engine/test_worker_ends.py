"""What ends a worker: crashes of its parts, and a step that hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from dataclasses import replace
from threading import enumerate as threads

import pytest
from tests.unit.engine.harness import some_tokens
from tests.unit.engine.models import VOCAB
from tests.unit.engine.worker_mesh import Mesh, make_submit, mesh, model_folder

from pagemesh.decode.role import role_settings as decode_role
from pagemesh.engine.executor import ModelExecutor
from pagemesh.engine.worker import service
from pagemesh.engine.worker.core import WorkerCore
from pagemesh.engine.worker.plan import StepPlan, StepResult
from pagemesh.engine.worker.service import run_worker
from pagemesh.engine.worker.spans import SequenceSpans
from pagemesh.kernels.native.locks import holder_is_dead
from pagemesh.runtime.service import EXIT_CRASHED, Stop
from pagemesh.runtime.supervise import CrashLoop
from pagemesh.wire.messages import Message

__all__ = ["mesh", "model_folder"]


async def test_a_crash_of_the_step_thread_ends_the_worker(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ModelExecutor, plan: StepPlan) -> StepResult:
        raise FloatingPointError("boom")

    monkeypatch.setattr(ModelExecutor, "run", broken)
    with pytest.raises(ExceptionGroup):
        async with mesh.worker("decode", "solo") as task:
            await mesh.submit("solo", make_submit(some_tokens(5, vocab=VOCAB)))
            await mesh.until(task.done)


async def test_a_step_that_never_ends_ends_the_process(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, ended = threading.Event(), asyncio.Event()
    compute = ModelExecutor.run

    def hangs(self: ModelExecutor, plan: StepPlan) -> StepResult:
        let_go.wait(20)
        return compute(self, plan)

    monkeypatch.setattr(ModelExecutor, "run", hangs)
    mesh.config = replace(mesh.config, host=replace(mesh.config.host, step_ms_max=300))
    monkeypatch.setattr(service, "_end_hung", ended.set)
    try:
        async with mesh.worker("decode", "solo"):
            await mesh.submit("solo", make_submit(some_tokens(5, vocab=VOCAB)))
            await asyncio.wait_for(ended.wait(), 10)
            let_go.set()
            await mesh.until(mesh.finished)
    finally:
        let_go.set()


@pytest.mark.parametrize("ended_by", ["a second signal while it drains", "a crash"])
async def test_a_worker_that_ends_while_a_long_step_computes_says_so_and_keeps_its_lock(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    """The step writes to pages, which are nobody else's until the process has ended."""
    let_go, began, stop = threading.Event(), threading.Event(), Stop()
    compute = ModelExecutor.run

    def takes_long(self: ModelExecutor, plan: StepPlan) -> StepResult:
        began.set()
        let_go.wait(20)
        return compute(self, plan)

    monkeypatch.setattr(ModelExecutor, "run", takes_long)
    config = replace(mesh.config, host=replace(mesh.config.host, name="solo"))
    task = asyncio.create_task(run_worker(config, stop, decode_role(config.worker)))
    try:
        await mesh.until(lambda: "solo" in mesh.ready and mesh.ready["solo"].state == "ready")
        await mesh.submit("solo", make_submit(some_tokens(5, vocab=VOCAB)))
        assert await asyncio.to_thread(began.wait, 20)
        if ended_by == "a crash":
            monkeypatch.delattr(WorkerCore, "take")
        else:
            stop.request()
            await mesh.until(lambda: mesh.ready["solo"].state == "draining")
            task.cancel()
        await asyncio.wait({task}, timeout=10)
        assert task.cancelled() or task.exception() is not None
        await mesh.until(lambda: mesh.ready["solo"].state == "leaving")
        [lock] = config.host.pool_dir.glob("worker-*.lock")
        assert stop.ends_hard and not holder_is_dead(lock)
        lock.unlink()
    finally:
        let_go.set()
        await mesh.until(lambda: not any(one.name.startswith("pagemesh-step") for one in threads()))


def test_the_process_of_a_step_that_hangs_ends_at_once_and_says_so() -> None:
    code = """
import threading
from pagemesh.engine.worker import service
threading.Thread(target=threading.Event().wait).start()
service._end_hung()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == EXIT_CRASHED
    assert "worker.step_hung" in ended.stdout + ended.stderr


async def test_a_worker_whose_lock_somebody_removed_ends_the_process(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could tell that it lives: no pager would have it, or its pages would be others'."""
    ended: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(service, "_end_process", lambda why, advice: ended.put_nowait(why))
    async with mesh.worker("decode", "solo"):
        [lock] = mesh.config.host.pool_dir.glob("worker-*.lock")
        lock.rename(lock.with_suffix(".moved"))
        assert await asyncio.wait_for(ended.get(), 10) == "worker.lock_removed"


async def test_a_call_that_crashes_ends_the_worker(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: SequenceSpans, message: Message, at_us: int) -> None:
        raise ArithmeticError("boom")

    with pytest.raises(ExceptionGroup) as caught:
        async with mesh.worker("decode", "solo") as task:
            monkeypatch.setattr(SequenceSpans, "call", broken)
            await mesh.submit("solo", make_submit(some_tokens(5, vocab=VOCAB)))
            await mesh.until(task.done)
    assert caught.group_contains(CrashLoop)
