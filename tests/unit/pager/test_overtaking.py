"""Who finds much more of its prompt cached may have pages before the first that waits for them."""

from __future__ import annotations

import pytest
from tests.unit.pager.rig import Rig, Worker, is_queued
from tests.unit.pager.steps import cache
from tests.unit.pager.test_waterfall import Preempted

from pagemesh.pager.leases.overtaking import PASSED_MAX
from pagemesh.wire.messages import LEVEL_US
from pagemesh.wire.pager_messages import Granted, Queued, Revoke

PREFIX = range(24)
"""Six pages that are cached, of a pool of sixteen."""
OTHER = range(700, 748)
"""Twelve pages of which nothing is."""


def full(rig: Rig, worker: Worker) -> Granted:
    """The prefix is cached, and somebody has all other pages."""
    cache(worker, 1, PREFIX)
    return worker.granted(2, range(500, 540))


def like(number: int) -> list[int]:
    """A prompt that begins with the prefix and takes two pages more."""
    return [*PREFIX, *range(1_000 * number, 1_000 * number + 8)]


def served(rig: Rig) -> list[int]:
    return [int(granted.key.request, 16) for granted in rig.taken(Granted)]


def test_who_has_its_prefix_cached_goes_before_a_first_whose_pages_would_take_its_place(
    rig: Rig, worker: Worker
) -> None:
    running = full(rig, worker)
    assert is_queued(worker.admit(3, OTHER)) and is_queued(worker.admit(4, like(4)))
    worker.release(running)
    (granted,) = rig.taken(Granted)
    assert granted.key.request.endswith("4") and granted.cached_tokens == 24
    assert not rig.taken(Revoke), "nor does the first take the pages back"
    worker.release(granted, cache=False)
    assert served(rig) == [3]


def test_the_first_takes_nothing_back_though_whoever_went_before_it_grows(
    rig: Rig, worker: Worker
) -> None:
    running = full(rig, worker)
    worker.admit(3, OTHER)
    worker.admit(4, like(4))
    worker.release(running)
    (granted,) = rig.taken(Granted)
    assert is_queued(worker.admit(3, OTHER)) and not rig.taken(Revoke)
    worker.extended(granted, 10, have=8)
    worker.release(granted, cache=False)
    assert served(rig) == [3]


@pytest.mark.parametrize(("pages", "goes_first"), [(10, 3), (11, 4)])
def test_a_first_for_whom_free_pages_suffice_goes_first(
    pages: int, goes_first: int, rig: Rig, worker: Worker
) -> None:
    running = full(rig, worker)
    worker.admit(3, OTHER[: 4 * pages])
    worker.admit(4, like(4))
    worker.release(running)
    assert served(rig)[0] == goes_first


@pytest.mark.parametrize(
    ("priority", "number"), [(-1, 4), (0, 3 + LEVEL_US)], ids=["more urgent", "ten seconds before"]
)
def test_nobody_goes_before_a_first_that_is(
    priority: int, number: int, rig: Rig, worker: Worker
) -> None:
    running = full(rig, worker)
    assert is_queued(worker.admit(3, OTHER, priority=priority))
    assert is_queued(worker.admit(number, like(4)))
    if priority:
        rig.taken(Revoke)  # of what runs, which is less urgent
        worker.ack(running)
    else:
        worker.release(running)
    assert served(rig)[0] == 3


def passes(rig: Rig, worker: Worker, lease: Granted, *, grows: bool) -> int:
    """``lease`` is released, then whoever was served, while others like it come: how often the
    first waiter, 10, was passed before it was served."""
    assert isinstance(worker.admit(10, OTHER), Queued)
    for passed in range(2 * PASSED_MAX):
        worker.admit(11 + passed, like(11 + passed))
        worker.release(lease)
        (lease, *_) = rig.taken(Granted)
        if lease.key.request == f"{10:032x}":
            return passed
        if grows:
            assert is_queued(worker.extend(lease, 16, have=8)), "it is ahead of the one it passed"
            rig.tick(1)
    raise AssertionError("it was never served")


def test_a_first_is_passed_so_many_times_and_then_served(rig: Rig, worker: Worker) -> None:
    assert passes(rig, worker, full(rig, worker), grows=False) == PASSED_MAX


def test_it_is_so_however_often_others_are_first_for_a_moment(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, PREFIX)
    worker.granted(2, [7])
    lease = worker.granted(3, range(500, 536))
    assert passes(rig, worker, lease, grows=True) == PASSED_MAX


def test_whoever_was_preempted_goes_before_nobody(rig: Rig, worker: Worker) -> None:
    other = Preempted(rig, "w-2", 2)
    running = full(rig, worker)
    worker.admit(3, OTHER)
    assert is_queued(other.admit(4, like(4)))
    worker.release(running)
    assert served(rig)[0] == 3
