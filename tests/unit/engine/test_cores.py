"""Workers of one host share its cores while they compute, and have all of them otherwise."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from pagemesh.engine.worker.cores import (
    LINGER_NS,
    SCAN_NS,
    STUCK_NS,
    FixedCores,
    SharedCores,
    share_of,
)
from pagemesh.kernels.native.locks import HolderLock
from pagemesh.wire.errors import ConfigError

EIGHT = range(8)


class Hand:
    """A clock that is moved by hand, in nanoseconds."""

    def __init__(self) -> None:
        self.now_ns = 10 * STUCK_NS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, ns: int) -> None:
        self.now_ns += ns


@pytest.fixture
def clock() -> Hand:
    return Hand()


Starter = Callable[..., SharedCores]


@pytest.fixture
def start(tmp_path: Path, clock: Hand) -> Iterator[Starter]:
    """Starts a worker of a name: its lock, unless it is dead, and its cores."""
    with ExitStack() as stack:

        def started(
            name: str, cores: range | list[int] = EIGHT, *, dead: bool = False
        ) -> SharedCores:
            path = tmp_path / f"worker-{name}.lock"
            if dead:
                path.touch()
            else:
                stack.enter_context(closing(HolderLock(path)))
            return stack.enter_context(closing(SharedCores(path, cores, clock)))

        yield started


@pytest.mark.parametrize("workers", range(1, 10))
@pytest.mark.parametrize("cores", [1, 2, 3, 8])
def test_shares_differ_by_one_at_most_and_use_every_core(cores: int, workers: int) -> None:
    shares = [share_of(cores, rank, workers) for rank in range(workers)]
    assert max(shares) - min(shares) <= 1 and min(shares) >= 1
    assert sum(shares) == max(cores, workers)


def test_a_worker_that_computes_alone_has_all_cores(start: Starter) -> None:
    one, two = start("a"), start("b")
    assert one.enter() == 8
    one.leave()
    assert one.enter() == 8, "its own last step is nobody else's"
    del two


def test_two_that_compute_at_once_take_half_each(start: Starter, clock: Hand) -> None:
    one, two = start("a"), start("b")
    assert one.enter() == 8
    assert two.enter() == 4
    one.leave()
    assert one.enter() == 4
    one.leave()
    clock.advance(LINGER_NS)
    two.leave()
    assert two.enter() == 8


def test_a_worker_between_two_steps_keeps_its_share(start: Starter, clock: Hand) -> None:
    one, two = start("a"), start("b")
    one.enter()
    one.leave()
    clock.advance(LINGER_NS - 1)
    assert two.enter() == 4


def test_an_odd_core_goes_to_the_first_by_name(start: Starter) -> None:
    one, two, three = start("a", range(5)), start("b", range(5)), start("c", range(5))
    one.enter()
    two.enter()
    assert three.enter() == 1
    two.leave()
    assert two.enter() == 2
    one.leave()
    assert one.enter() == 2


def test_workers_that_are_bound_to_other_cores_are_nothing_to_share_with(start: Starter) -> None:
    one, two = start("a", [0, 1]), start("b", [2, 3])
    one.enter()
    assert two.enter() == 2


def test_a_worker_that_comes_later_is_found(start: Starter, clock: Hand) -> None:
    one = start("a")
    assert one.enter() == 8
    start("b").enter()
    one.leave()
    clock.advance(SCAN_NS)
    assert one.enter() == 4


@pytest.mark.parametrize(("dead", "share"), [(True, 8), (False, 4)])
def test_who_was_killed_in_a_step_is_told_from_who_computes_long(
    start: Starter, clock: Hand, dead: bool, share: int
) -> None:
    one = start("a")
    start("b", dead=dead).enter()
    assert one.enter() == 4
    one.leave()
    clock.advance(STUCK_NS + SCAN_NS)
    assert one.enter() == share


def test_a_worker_that_left_is_forgotten(start: Starter, clock: Hand, tmp_path: Path) -> None:
    one = start("a")
    start("b").enter()
    assert one.enter() == 4
    (tmp_path / "worker-b.lock").unlink()
    clock.advance(SCAN_NS)
    one.leave()
    assert one.enter() == 8


def test_when_the_folder_is_removed_those_who_know_each_other_go_on_sharing(
    start: Starter, clock: Hand, tmp_path: Path
) -> None:
    one, two = start("a"), start("b")
    assert one.enter() == 8
    one.leave()
    shutil.rmtree(tmp_path)
    clock.advance(SCAN_NS)
    two.enter()
    assert one.enter() == 4


def test_a_lock_that_says_nothing_yet_is_passed_over(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "worker-b.lock").touch()
    (tmp_path / "other.lock").write_bytes(b"\xff" * 200)
    assert start("a").enter() == 8


def test_a_folder_without_room_is_named() -> None:
    with pytest.raises(ConfigError, match="No space left on device; make room in PAGEMESH_POOL"):
        SharedCores(Path("/dev/full"), EIGHT, Hand())


def test_a_number_of_threads_that_was_asked_for_is_kept() -> None:
    cores = FixedCores(3)
    assert cores.enter() == 3
    cores.leave()
    cores.close()
