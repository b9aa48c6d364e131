"""Workers of one host whose cores overlap take turns: one computes at a time, on all cores."""

from __future__ import annotations

import ctypes
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from pagemesh.engine.worker.plan import NO_READERS, Readers
from pagemesh.engine.worker.turns import (
    LINGER_NS,
    PATIENCE_NS,
    SCAN_NS,
    NoTurns,
    SharedTurns,
)
from pagemesh.kernels.native.library import library
from pagemesh.kernels.native.locks import HolderLock
from pagemesh.wire.errors import ConfigError

EIGHT = range(8)
SOON_S = 10.0


class Hand:
    """A clock that is moved by hand, in nanoseconds."""

    def __init__(self) -> None:
        self.now_ns = 10 * PATIENCE_NS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, ns: int) -> None:
        self.now_ns += ns


@pytest.fixture
def clock() -> Hand:
    return Hand()


Starter = Callable[..., SharedTurns]


@pytest.fixture
def start(tmp_path: Path, clock: Hand) -> Iterator[Starter]:
    """Starts a worker of a name: its lock, unless it is dead, and its words."""
    with ExitStack() as stack:

        def started(
            name: str, cores: range | list[int] = EIGHT, *, threads: int = 8, dead: bool = False
        ) -> SharedTurns:
            path = tmp_path / f"worker-{name}.lock"
            if dead:
                path.touch()
            else:
                stack.enter_context(closing(HolderLock(path)))
            return stack.enter_context(closing(SharedTurns(path, cores, clock, threads)))

        yield started


class Entering:
    """A worker that enters on a thread of its own."""

    def __init__(self, turns: SharedTurns, drawing_rows: int = 0) -> None:
        self.entered = threading.Event()
        self.readers = NO_READERS
        self._turns, self._drawing_rows = turns, drawing_rows
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def waits(self, s: float = 0.1) -> bool:
        return not self.entered.wait(s)

    def goes(self) -> bool:
        return self.entered.wait(SOON_S)

    def join(self) -> None:
        self._thread.join(SOON_S)

    def _run(self) -> None:
        self.readers = self._turns.enter(self._drawing_rows)
        self.entered.set()


Enterer = Callable[..., Entering]


@pytest.fixture
def enter(start: Starter, clock: Hand) -> Iterator[Enterer]:
    """Has a worker begin a step; at the end everybody loses patience."""
    threads: list[Entering] = []

    def entered(turns: SharedTurns, drawing_rows: int = 0) -> Entering:
        threads.append(Entering(turns, drawing_rows))
        return threads[-1]

    yield entered
    clock.advance(1_000 * PATIENCE_NS)
    for thread in threads:
        thread.join()


def test_a_bound_on_threads_bounds_no_cores_that_steps_take_turns_on(
    enter: Enterer, start: Starter
) -> None:
    """Few threads may run on any of the cores, so that those of two steps would meet."""
    one, two = start("a", threads=2), start("b", threads=2)
    assert one.thread_count == 2
    assert one.cores == two.cores == bytes([0xFF])
    one.enter(1)
    assert enter(two).waits()


def test_a_run_can_see_who_waits_for_its_cores(enter: Enterer, start: Starter) -> None:
    one, two, elsewhere = start("a", [0, 1]), start("b", [1, 2]), start("c", [3])
    one.enter(1)
    (word,) = one.others_waiting()
    wanted = ctypes.c_uint64.from_address(word)
    assert not wanted.value and not one.is_wanted()
    elsewhere.enter(1)
    waiting = enter(two)
    assert waiting.waits()
    assert wanted.value and one.is_wanted()
    one.leave(3)
    assert waiting.goes()
    assert not wanted.value and not one.is_wanted()


def test_who_died_waiting_is_seen_by_no_run(start: Starter, tmp_path: Path, clock: Hand) -> None:
    one, _ = start("a"), start("b", dead=True)
    words = np.memmap(tmp_path / "worker-b.lock", "<u8", "r+")
    one.enter(1)
    one.leave()
    words[1] = clock() - 1
    one.enter(1)
    assert one.others_waiting() == () and not one.is_wanted()
    one.leave()


def test_the_steps_of_a_call_share_what_it_took(start: Starter, clock: Hand) -> None:
    one, two = start("a"), start("b")
    one.enter(4)
    clock.advance(8_000_000)
    one.leave(4)
    two.enter(0)
    two.leave()
    assert two.enter(0) == Readers(4, 2_000)


def test_nobody_waits_for_workers_that_do_not_compute(start: Starter) -> None:
    one, _ = start("a"), start("b")
    for _ in range(3):
        one.enter(1)
        one.leave()


def test_a_step_waits_for_the_end_of_another(enter: Enterer, start: Starter) -> None:
    one, two = start("a"), start("b")
    one.enter(0)
    waiting = enter(two)
    assert waiting.waits()
    one.leave()
    assert waiting.goes()


def test_who_waits_goes_before_who_has_just_computed(
    enter: Enterer, start: Starter, clock: Hand
) -> None:
    one, two = start("a"), start("b")
    one.enter(0)
    waiting = enter(two)
    assert waiting.waits()
    clock.advance(1_000)
    one.leave()
    again = enter(one)
    assert waiting.goes() and again.waits()
    two.leave()
    assert again.goes()


def test_of_two_that_come_at_once_the_first_by_name_goes_first(
    enter: Enterer, start: Starter
) -> None:
    one, two, three = start("a"), start("b"), start("c")
    three.enter(0)
    second, first = enter(two), enter(one)
    assert first.waits() and second.waits()
    three.leave()
    assert first.goes() and second.waits()
    one.leave()
    assert second.goes()


def test_many_that_compute_all_the_time_never_overlap_and_all_get_on(
    tmp_path: Path,
) -> None:
    running, overlaps, steps = 0, 0, [0, 0, 0]
    until = time.monotonic() + 0.5

    def compute(number: int) -> None:
        nonlocal running, overlaps
        path = tmp_path / f"worker-{number}.lock"
        with closing(HolderLock(path)):
            turns = SharedTurns(path, EIGHT, time.monotonic_ns, 8)
            ready.wait(SOON_S)
            with closing(turns):
                while time.monotonic() < until:
                    turns.enter(1)
                    running += 1
                    time.sleep(0.001)
                    overlaps += running > 1
                    running -= 1
                    steps[number] += 1
                    turns.leave()
                done.wait(SOON_S)

    ready, done = threading.Barrier(3), threading.Barrier(3)
    threads = [threading.Thread(target=compute, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps <= 0.02 * sum(steps), "the words are hints, but good ones"
    assert min(steps) > 0.5 * max(steps), steps


def test_workers_that_are_bound_to_other_cores_do_not_wait(start: Starter) -> None:
    one, two = start("a", [0, 1]), start("b", [2, 3])
    one.enter(4)
    assert two.enter(0) == NO_READERS


def test_who_computes_hears_of_those_who_read_from_others(start: Starter, clock: Hand) -> None:
    one, two, three = start("a"), start("b"), start("c")
    for turns, rows, us in ((one, 5, 3_000), (two, 2, 1_000)):
        turns.enter(rows)
        clock.advance(1_000 * us)
        turns.leave()
    assert three.enter(0) == Readers(rows=7, step_us=4_000)
    three.leave()
    clock.advance(LINGER_NS)
    assert three.enter(0) == NO_READERS, "nobody has read for a while"


def test_those_who_wait_count_as_reading(enter: Enterer, start: Starter, clock: Hand) -> None:
    one, two = start("a"), start("b")
    two.enter(3)
    clock.advance(2_000_000)
    two.leave()
    one.enter(0)
    waiting = enter(two, 3)
    assert waiting.waits()
    clock.advance(LINGER_NS)
    one.leave()
    assert waiting.goes()
    again = enter(one)
    two.leave()
    assert again.goes() and again.readers.rows == 3


def test_a_worker_that_comes_later_is_found(enter: Enterer, start: Starter, clock: Hand) -> None:
    one = start("a")
    one.enter(0)
    one.leave()
    start("b").enter(0)
    clock.advance(SCAN_NS)
    assert enter(one).waits()


def test_nobody_waits_for_who_was_killed_in_a_step(enter: Enterer, start: Starter) -> None:
    one = start("a")
    start("b", dead=True).enter(0)
    assert enter(one).goes()


def test_who_stands_still_is_waited_for_a_while_and_once(
    enter: Enterer, start: Starter, clock: Hand
) -> None:
    one, frozen = start("a"), start("b")
    frozen.enter(0)
    waiting = enter(one)
    assert waiting.waits()
    clock.advance(PATIENCE_NS + 1)
    assert waiting.goes()
    one.leave()
    assert enter(one).goes(), "it has waited for that turn"
    one.leave()
    frozen.leave()
    frozen.enter(0)
    assert enter(one).waits(), "it has a new one"


def test_who_takes_long_for_a_step_is_waited_for_longer(
    enter: Enterer, start: Starter, clock: Hand
) -> None:
    one, slow = start("a"), start("b")
    slow.enter(0)
    clock.advance(PATIENCE_NS)
    slow.leave()
    slow.enter(0)
    waiting = enter(one)
    assert waiting.waits()
    clock.advance(PATIENCE_NS + 1)
    assert waiting.waits()
    clock.advance(3 * PATIENCE_NS)
    assert waiting.goes()


def test_nobody_waits_for_who_has_closed(
    enter: Enterer, start: Starter, tmp_path: Path, clock: Hand
) -> None:
    one = start("a")
    with closing(HolderLock(tmp_path / "worker-b.lock")) as lock:
        two = SharedTurns(lock.path, EIGHT, clock, 8)
        two.enter(0)
        waiting = enter(one)
        assert waiting.waits()
        two.close()
        assert waiting.goes()


def test_a_worker_that_left_is_forgotten(
    enter: Enterer, start: Starter, clock: Hand, tmp_path: Path
) -> None:
    one = start("a")
    start("b").enter(0)
    (tmp_path / "worker-b.lock").unlink()
    clock.advance(SCAN_NS)
    assert enter(one).goes()


def test_when_the_folder_is_removed_those_who_know_each_other_go_on_taking_turns(
    enter: Enterer, start: Starter, clock: Hand, tmp_path: Path
) -> None:
    one, two = start("a"), start("b")
    one.enter(0)
    one.leave()
    shutil.rmtree(tmp_path)
    clock.advance(SCAN_NS)
    two.enter(0)
    assert enter(one).waits()


def test_a_lock_that_says_nothing_yet_is_passed_over(
    enter: Enterer, start: Starter, tmp_path: Path
) -> None:
    (tmp_path / "worker-b.lock").touch()
    (tmp_path / "other.lock").write_bytes(b"\xff" * 200)
    assert enter(start("a")).goes()


def test_a_folder_without_room_is_named() -> None:
    with pytest.raises(ConfigError, match="No space left on device; make room in PAGEMESH_POOL"):
        SharedTurns(Path("/dev/full"), EIGHT, Hand(), 8)


def test_a_number_of_threads_that_was_asked_for_is_kept() -> None:
    turns = NoTurns(3)
    assert turns.enter(1) == NO_READERS
    assert turns.thread_count == 3
    turns.leave()
    turns.close()


def test_a_word_that_changes_wakes_another_process(tmp_path: Path) -> None:
    path = tmp_path / "worker-a.lock"
    with closing(HolderLock(path)):
        turns = SharedTurns(path, EIGHT, time.monotonic_ns, 8)
        turns.enter(0)
        began = time.monotonic()
        child = os.fork()
        if not child:
            time.sleep(0.2)
            turns.leave()
            os._exit(0)
        library().pm_word_await(turns._own._address, turns._own.words[0], 60_000_000)
        assert 0.1 < time.monotonic() - began < 30.0
        os.waitpid(child, 0)
        turns.close()
