"""Workers that were killed leave their lock files behind, and nothing with those who live."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.engine.test_turns import EIGHT, Enterer, Hand, Starter, clock, enter, start

from pagemesh.engine.worker.turns import SCAN_NS, SharedTurns
from pagemesh.kernels.native.locks import open_lock, try_lock

__all__ = ["clock", "enter", "start"]


def test_who_was_killed_leaves_no_open_file_with_others(
    start: Starter, tmp_path: Path, clock: Hand
) -> None:
    one, path = start("a"), tmp_path / "worker-b.lock"
    path.touch()
    lock = open_lock(path)
    assert try_lock(lock)
    SharedTurns(path, EIGHT, clock, 8).close()
    clock.advance(SCAN_NS)
    one.enter(0)
    one.leave()
    os.close(lock)
    assert open_count(path), "it has been found"
    clock.advance(SCAN_NS)
    one.enter(0)
    one.leave()
    assert path.exists() and open_count(path) == 0


def test_many_who_were_killed_are_in_nobodys_place(
    enter: Enterer, start: Starter, monkeypatch: pytest.MonkeyPatch, clock: Hand
) -> None:
    monkeypatch.setattr("pagemesh.engine.worker.turns.WORKERS_MAX", 2)
    one = start("a")
    for name in ("b", "c"):
        start(name, dead=True)
    one.enter(0)
    one.leave()
    start("d").enter(0)
    clock.advance(SCAN_NS)
    assert enter(one).waits()


def test_who_was_killed_is_waited_for_no_longer_when_the_pager_has_removed_its_file(
    enter: Enterer, start: Starter, tmp_path: Path, clock: Hand
) -> None:
    """It is still told that it is dead: no clock moves here, so that patience does not end."""
    one, path = start("a"), tmp_path / "worker-b.lock"
    path.touch()
    lock = open_lock(path)
    assert try_lock(lock)
    with closing(SharedTurns(path, EIGHT, clock, 8)) as killed:
        killed.enter(0)
        waiting = enter(one)
        assert waiting.waits()
        path.unlink()
        assert waiting.waits(), "its step goes on, whoever removed the file"
        os.close(lock)
        assert waiting.goes()


def open_count(path: Path) -> int:
    """How often this process has a file open."""
    links = Path("/proc/self/fd").iterdir()
    found = [entry.readlink() for entry in links if entry.exists()]
    return found.count(path)
