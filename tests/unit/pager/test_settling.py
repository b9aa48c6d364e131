"""What a pager that began anew, or was away, does not do to those who were there all the time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.pager.rig import LIMITS, Rig, Worker, code_of, fill_of, is_queued, key_of, table_of
from tests.unit.pager.test_quotas import ALICE, EIGHT, prompt
from tests.unit.pager.test_recovery import declare, line

from pagemesh.pager.events import Tick
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.tiers.load import PAGER
from pagemesh.pager.tiers.movers import Movers
from pagemesh.wire.pager_messages import Extended, Granted, Revoke


@pytest.fixture
def other(rig: Rig) -> Worker:
    return Worker(rig, "other", 2)


def half_settled(rig: Rig, worker: Worker, other: Worker) -> list[Granted]:
    """After a restart: four pages of three leases, which one of two workers has declared, and
    twelve that are cached, which the other may read still."""
    other.release(other.granted(9, prompt(9, 12)), prompt(9, 12))
    sizes = {1: 1, 2: 1, 3: 2}
    leases = [worker.granted(number, prompt(number, pages)) for number, pages in sizes.items()]
    rig.restart([worker.holder, other.holder])
    lines = [line(lease, number, []) for number, lease in enumerate(leases, start=1)]
    assert declare(rig, worker, *lines) == []
    assert not rig.core.books.pool.free and rig.core.books.pool.idle == 12
    return leases


def test_nothing_is_taken_back_for_what_is_to_be_had_once_all_have_declared(
    rig: Rig, worker: Worker, other: Worker
) -> None:
    oldest = half_settled(rig, worker, other)[0]
    assert is_queued(worker.extend(oldest, 2, 1))
    assert is_queued(worker.admit(0, prompt(5, 3)))
    assert not rig.taken(Revoke)
    assert declare(rig, other) == []
    told = [type(notice.message) for notice in rig.notices]
    assert Extended in told and Granted in told, "as soon as the last has"


def test_the_oldest_does_not_wait_for_that_for_long(
    rig: Rig, worker: Worker, other: Worker
) -> None:
    leases = half_settled(rig, worker, other)
    for _ in range(LIMITS.settle_late_ms // 1_000 + 1):
        rig.tick(1_000)
        worker.heartbeat(*leases)
    assert is_queued(worker.extend(leases[0], 2, 1))
    assert [revoke.lease for revoke in rig.taken(Revoke)] == [leases[2].lease]


def test_a_pager_that_was_away_has_its_queue_still(rig: Rig, worker: Worker) -> None:
    """Nobody could ask again, whoever is first."""
    first = worker.granted(1, prompt(1, 14))
    for number in (5, 6):
        assert is_queued(worker.admit(number, prompt(number, 8)))
    rig.now_ms += 4_000
    rig.handle(Tick(away_ms=3_900))
    worker.release(first, cache=False)
    assert [granted.key for granted in rig.taken(Granted)] == [key_of(5), key_of(6)]


def test_who_waits_for_its_tenant_is_not_forgotten_either(rig: Rig, worker: Worker) -> None:
    first = worker.granted(1, prompt(1, 6), root=ALICE, terms=EIGHT)
    assert is_queued(worker.admit(2, prompt(2, 3), root=ALICE, terms=EIGHT))
    rig.now_ms += 4_000
    rig.handle(Tick(away_ms=3_900))
    worker.release(first, cache=False)
    assert [granted.key for granted in rig.taken(Granted)] == [key_of(2)]


def test_a_writer_does_not_stand_still_while_the_pager_is_away(
    rig: Rig, worker: Worker, other: Worker
) -> None:
    filling = worker.granted(1, prompt(1, 8))
    assert is_queued(other.admit(2, [*prompt(1, 8), 9]))
    rig.now_ms += LIMITS.in_flight_stall_ms_max + 1_500
    rig.handle(Tick(away_ms=LIMITS.in_flight_stall_ms_max + 1_000))
    assert not rig.taken(Granted) and rig.core.books.in_flight.wait_count == 1
    worker.committed(filling, prompt(1, 8))
    [granted] = rig.taken(Granted)
    assert granted.cached_tokens == 32


def test_nothing_more_is_read_from_a_disk_that_does_not_answer() -> None:
    limits = PagerLimits()
    movers = Movers(limits)
    books: Any = SimpleNamespace(
        now_ms=limits.mover_slow_ms, loads={1: SimpleNamespace(incarnation=PAGER, begun_ms=0)}
    )
    assert movers.can_fill(5, books)
    books.now_ms += 1
    assert not movers.can_fill(5, books)


def test_whoever_is_refused_when_it_asks_again_waits_no_more(rig: Rig, worker: Worker) -> None:
    worker.granted(1, prompt(1, 14))
    assert is_queued(worker.admit(2, prompt(2, 8)))
    assert is_queued(worker.admit(3, prompt(3, 1)))
    assert code_of(worker.admit(2, prompt(2, 8), deadline_ms=0)) == "DeadlineExceeded"
    assert [granted.key for granted in rig.taken(Granted)] == [key_of(3)]


def test_growth_does_not_wait_for_who_finds_no_place_for_a_lease() -> None:
    rig = Rig(32, limits=PagerLimits(lease_count_max=2))
    worker = Worker(rig, "w", 1)
    leases = [worker.granted(number, prompt(number, 1)) for number in (10, 11)]
    assert code_of(worker.admit(5, prompt(5, 1))) == "Busy"
    assert isinstance(worker.extend(leases[0], 2, 1), Extended)


def test_a_ticket_is_redeemed_after_a_restart_however_its_pages_lie(rig: Rig) -> None:
    worker, decode = Worker(rig, "w", 1), Worker(rig, "decode", 2)
    single = [worker.granted(number, [100 + number] * 4) for number in range(16)]
    for number in (0, 2):
        worker.release(single[number], (), cache=False)
    first = list(range(8))
    worker.release(worker.granted(99, first), first)  # an edge of pages that lie apart
    for number in (3, 4):
        worker.release(single[number], (), cache=False)
    ids = list(range(12))
    lease = worker.granted(100, ids, 16)
    assert table_of(lease) == [0, 2, 3, 4]
    offered = worker.offered(lease, fill_of(ids))
    rig.restart([worker.holder, decode.holder])
    assert not declare(rig, worker, line(lease, 100, ids, ticket=offered.ticket))
    decode.open()
    assert decode.redeemed(lease.key, offered, 16).cached_tokens == 12
