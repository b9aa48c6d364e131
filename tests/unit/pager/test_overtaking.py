"""Who finds much more of its prompt cached may have pages before the first that waits for them."""

from __future__ import annotations

import pytest
from tests.unit.pager.rig import ROOT, Rig, Worker, is_queued, key_of, order_of
from tests.unit.pager.steps import cache
from tests.unit.pager.test_waterfall import Preempted

from pagemesh.pager.leases.overtaking import PASSED_MAX, Outlook, Overtaking
from pagemesh.pager.leases.waiting import Waiter, WaitList, place_of
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.messages import LEVEL_US
from pagemesh.wire.pager_messages import Admit, Granted, Queued, Revoke
from pagemesh.wire.tokens import pack

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


def test_nobody_goes_before_the_first_with_more_than_its_tenant_may_use(
    rig: Rig, worker: Worker
) -> None:
    terms, apart = CacheTerms(tenant="alice", pages_max=8), bytes(32)
    cache(worker, 1, PREFIX, terms=terms)
    running = worker.granted(5, range(500, 540), root=apart)
    assert is_queued(worker.admit(6, OTHER, root=apart))
    assert is_queued(worker.admit(7, like(7), terms=terms)), "its tenant may use as much"
    worker.granted(2, [9], terms=terms)
    worker.release(running)
    assert served(rig) == [6]
    assert rig.core.books.accounts.by_tenant["alice"].used_pages == 1


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


def waiter(number: int) -> Waiter:
    order = order_of(number)
    message = Admit(
        key=key_of(number), order=order, worker="w", incarnation=1, epoch=1, root=ROOT,
        tokens=pack(range(8)), reserve_tokens=8, deadline_ms=1_000,
    )  # fmt: skip
    return Waiter(place_of(order, 1, 1), message, order, forget_ms=1_000)


def waiting(*numbers: int) -> WaitList:
    found = WaitList(8)
    for number in numbers:
        found.put(waiter(number))
    return found


@pytest.mark.parametrize(("share", "goes_first"), [(0.7, 5), (0.8, 6)])
def test_a_little_more_of_its_prompt_lets_nobody_go_before_the_first(
    share: float, goes_first: int
) -> None:
    shares = {key_of(5): 0.5, key_of(6): share}
    overtaking = Overtaking(lambda message: Outlook(shares[message.key], True, True))
    assert overtaking.next(waiting(5, 6)).message.key == key_of(goes_first)


def test_how_often_a_first_was_passed_is_remembered_while_somebody_older_is_the_first() -> None:
    shares = {key_of(1): 0.0, key_of(5): 0.0, key_of(6): 1.0}
    overtaking = Overtaking(lambda message: Outlook(shares[message.key], True, True))
    for _ in range(PASSED_MAX - 1):
        overtaking.passed(waiting(5, 6))
    overtaking.passed(waiting(1, 5, 6))
    assert overtaking.next(waiting(5, 6)).message.key == key_of(6)
    overtaking.passed(waiting(5, 6))
    assert overtaking.next(waiting(5, 6)).message.key == key_of(5)
