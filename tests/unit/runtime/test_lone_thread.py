"""A thread that its process does not wait for."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from pagemesh.runtime.lone_thread import LoneThread

HANGS = """
import time
from pagemesh.runtime.lone_thread import LoneThread

made = LoneThread("hangs")
made.submit(time.sleep, 600)
made.shutdown(wait=False, cancel_futures=True)
print("done")
"""


def test_a_process_ends_though_it_hangs() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=30, check=True
    )
    assert (ended.stdout, ended.stderr) == ("done\n", "")


def test_what_it_is_told_is_done_in_order_on_one_thread_until_it_is_shut_down() -> None:
    made, done = LoneThread("ours"), list[tuple[int, str]]()

    def note(number: int) -> int:
        done.append((number, threading.current_thread().name))
        return number + 1

    futures = [made.submit(note, number) for number in range(100)]
    made.shutdown()
    assert [future.result() for future in futures] == list(range(1, 101))
    assert done == [(number, "ours") for number in range(100)]
    with pytest.raises(RuntimeError, match="ours was shut down"):
        made.submit(note, 1)


def test_what_fails_fails_alone() -> None:
    made = LoneThread("fails")
    failed, done = made.submit(int, "x"), made.submit(int, "1")
    made.shutdown()
    assert isinstance(failed.exception(), ValueError) and done.result() == 1


def test_what_has_not_begun_is_cancelled_if_that_is_wanted() -> None:
    made, begun, gate = LoneThread("waits"), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        gate.wait(20.0)

    first, second = made.submit(wait), made.submit(int, "1")
    assert begun.wait(20.0)
    made.shutdown(wait=False, cancel_futures=True)
    made.shutdown(wait=False, cancel_futures=True)
    assert second.cancelled() and not first.done()
    gate.set()
    made.shutdown()
    assert first.result() is None


def test_one_that_was_told_nothing_ends_at_once() -> None:
    LoneThread("idle").shutdown()
