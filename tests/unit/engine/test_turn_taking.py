"""Which workers take turns on their cores, and on how many threads they compute."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from pagemesh.engine import cores
from pagemesh.engine.worker.start import turns_of
from pagemesh.engine.worker.turns import NoTurns, SharedTurns, Turns
from pagemesh.runtime.settings import WorkerConfig

EIGHT = set(range(8))
Taker = Callable[..., Turns]


@pytest.fixture
def take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Taker]:
    """The turns of a worker with eight cores, and a CPU quota if one is given."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: EIGHT)
    path = tmp_path / "worker-a.lock"
    path.touch()
    with ExitStack() as stack:

        def taken(config: WorkerConfig, *, quota: float = math.inf) -> Turns:
            monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
            return stack.enter_context(closing(turns_of(config, path)))

        yield taken


def test_a_worker_computes_on_all_of_its_cores_in_turns(take: Taker) -> None:
    turns = take(WorkerConfig())
    assert isinstance(turns, SharedTurns)
    assert turns.thread_count == 8


def test_a_cpu_quota_takes_threads_away_and_no_turns(take: Taker) -> None:
    turns = take(WorkerConfig(), quota=2.5)
    assert isinstance(turns, SharedTurns)
    assert turns.thread_count == 2
    assert turns.cores == bytes([0xFF])


@pytest.mark.parametrize("threads", [5, 8, 9])
def test_threads_that_leave_no_cores_for_as_many_of_another_worker_take_turns(
    take: Taker, threads: int
) -> None:
    turns = take(WorkerConfig(thread_count=threads))
    assert isinstance(turns, SharedTurns)
    assert turns.thread_count == threads
    assert turns.cores == bytes([0xFF])


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_that_leave_cores_for_as_many_of_another_worker_begin_at_once(
    take: Taker, threads: int
) -> None:
    turns = take(WorkerConfig(thread_count=threads))
    assert isinstance(turns, NoTurns)
    assert turns.thread_count == threads
    assert turns.cores == b""


def test_a_worker_on_a_gpu_needs_one_thread_and_no_turns(take: Taker) -> None:
    turns = take(WorkerConfig(device="cuda"))
    assert isinstance(turns, NoTurns)
    assert turns.thread_count == 1
