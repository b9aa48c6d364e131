"""Whoever waits for pages may say that it wants none any more: nobody waits behind it then."""

from __future__ import annotations

from tests.unit.pager.rig import Rig, Worker, code_of, fill_of, is_queued, key_of
from tests.unit.pager.test_quotas import ALICE, EIGHT, prompt

from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import NO_LEASE, Granted, Release


def leave(worker: Worker, number: int) -> None:
    message = Release(
        key=key_of(number), worker=worker.name, incarnation=worker.incarnation, lease=NO_LEASE,
        fill=fill_of(()),
    )  # fmt: skip
    assert isinstance(worker.rig.ask(message), Ok)


def test_who_waited_behind_it_for_room_is_served(rig: Rig, worker: Worker) -> None:
    worker.granted(1, prompt(1, 10))
    assert is_queued(worker.admit(2, prompt(2, 10)))
    assert is_queued(worker.admit(3, prompt(3, 4)))
    leave(worker, 2)
    assert [one.key for one in rig.taken(Granted)] == [key_of(3)]
    assert not rig.core.books.waiting.count


def test_who_waits_for_its_tenant_or_for_what_is_in_flight_leaves_too(
    rig: Rig, worker: Worker
) -> None:
    ids = prompt(1, 6)
    first = worker.granted(1, ids, root=ALICE, terms=EIGHT)
    assert is_queued(worker.admit(2, prompt(2, 3), root=ALICE, terms=EIGHT))
    other = worker.granted(4, prompt(4, 3))
    assert is_queued(worker.admit(3, [*prompt(4, 3), 9]))
    assert rig.core.books.in_flight.wait_count == 1
    for number in (2, 3):
        leave(worker, number)
    assert not rig.core.books.waiting.count and not rig.core.books.in_flight.wait_count
    worker.release(first, ids)
    worker.committed(other, prompt(4, 3))
    assert not rig.taken(Granted)


def test_nobody_is_in_the_way_of_who_never_waited(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, prompt(1, 2))
    leave(worker, 1)
    assert worker.committed(lease, prompt(1, 2)) == 8


def test_nobody_is_served_since_somebody_who_never_waited_asked_for_nonsense(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(1, prompt(1, 10))
    assert is_queued(worker.admit(2, prompt(2, 10)))
    rig.core.books.freed = False
    assert code_of(worker.admit(3, [])) == "Malformed"
    assert not rig.core.books.freed


def test_growth_that_is_refused_when_it_is_asked_for_again_waits_no_more(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(1, prompt(1, 10))
    grows = worker.granted(2, prompt(2, 5))
    for page_count, have, code in ((17, 0, "NoCapacity"), (8, 6, "Malformed")):
        assert is_queued(worker.extend(grows, 8))
        assert is_queued(worker.admit(3, [1]))
        assert code_of(worker.extend(grows, page_count, have)) == code
        [served] = rig.taken(Granted)
        assert served.key == key_of(3) and not rig.core.books.waiting.count
        worker.release(served)


def test_nor_does_growth_beyond_its_tenants_quota(rig: Rig, worker: Worker) -> None:
    grows = worker.granted(1, prompt(1, 5), root=ALICE, terms=EIGHT)
    worker.granted(2, prompt(2, 10))
    assert is_queued(worker.extend(grows, 7))
    assert code_of(worker.extend(grows, 9)) == "OverQuota"
    assert not rig.core.books.waiting.count
