"""What is in a sequence's way gives way when nothing else helps, and not before."""

from __future__ import annotations

from tests.unit.pager.disk_rig import PROMPT, DiskRig, put_on_disk
from tests.unit.pager.rig import Rig, Worker, is_queued, key_of
from tests.unit.pager.steps import OTHER, cache, pinned, stats
from tests.unit.pager.test_lost_leases import lost_lease
from tests.unit.pager.test_recovery import declare, line

from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.pager_messages import Extended, Granted, Revoke

KEPT, LONG = range(50, 62), range(200, 252)
"""Three pages that are pinned, and a prompt of thirteen: all the others of sixteen."""


def holding_copies(worker: Worker, number: int) -> Granted:
    """A lease with four pages of its own, of what the tree has in four others."""
    cache(worker, 90, range(16))
    lease = worker.granted(number, range(16), read_cache=False)
    assert worker.committed(lease, range(16)) == 16
    return lease


def test_a_pin_stays_while_pages_are_filled_from_disk_that_will_be_had() -> None:
    rig = DiskRig(16)
    worker = Worker(rig, "w", 1)
    put_on_disk(rig, worker, PROMPT)
    cache(worker, 2, KEPT)
    pinned(rig, KEPT)
    assert is_queued(worker.admit(3, PROMPT)) and rig.loads
    assert is_queued(worker.admit(4, LONG))
    rig.tick()
    rig.load()
    [read] = rig.taken(Granted)
    worker.release(read, PROMPT)
    assert [granted.key for granted in rig.taken(Granted)] == [key_of(4)]
    assert len(stats(rig).pins) == 1


def test_a_pin_stays_while_pages_drain_that_will_be_had(rig: Rig, worker: Worker) -> None:
    lost = lost_lease(rig, worker)
    assert declare(rig, worker, line(lost, 1, [])) == [lost.lease]
    assert stats(rig).draining_pages == 3
    cache(worker, 2, KEPT)
    pinned(rig, KEPT)
    assert is_queued(worker.admit(4, LONG))
    rig.tick()
    worker.ack(lost)
    assert [granted.key for granted in rig.taken(Granted)] == [key_of(4)]
    assert len(stats(rig).pins) == 1


def test_a_pin_stays_while_somebody_who_was_told_to_has_not_let_go_of_what_is_cached(
    rig: Rig, worker: Worker
) -> None:
    """It holds no page of its own, so that none drains."""
    cache(worker, 1, KEPT)
    pinned(rig, KEPT)
    reading = worker.granted(5, range(100, 108))
    worker.committed(reading, range(100, 108))
    assert is_queued(worker.admit(4, LONG))
    assert [revoke.lease for revoke in rig.taken(Revoke)] == [reading.lease]
    rig.tick()
    assert len(stats(rig).pins) == 1
    worker.ack(reading)
    assert [granted.key for granted in rig.taken(Granted)] == [key_of(4)]
    assert len(stats(rig).pins) == 1


def test_copies_are_kept_while_somebody_older_will_give_pages_back(
    rig: Rig, worker: Worker
) -> None:
    older = worker.granted(1, range(100, 104))
    lease = holding_copies(worker, 2)
    assert is_queued(worker.extend(lease, 12, 4)), "seven are free"
    rig.tick()
    assert not rig.taken(Revoke)
    worker.release(older, range(100, 104))
    assert [extended.lease for extended in rig.taken(Extended)] == [lease.lease]


def test_copies_are_given_up_when_nothing_else_makes_room(rig: Rig, worker: Worker) -> None:
    lease = holding_copies(worker, 2)
    assert is_queued(worker.extend(lease, 13, 4)), "eight are free"
    rig.tick()
    assert [revoke.lease for revoke in rig.taken(Revoke)] == [lease.lease]
    worker.ack(lease)
    assert worker.granted(2, range(16), 52).cached_tokens == 12


def test_copies_are_given_up_for_a_quota_whatever_others_hold_who_are_older(
    rig: Rig, worker: Worker
) -> None:
    terms = CacheTerms(tenant="alice", pages_max=8)
    worker.granted(1, range(100, 104), root=OTHER)
    cache(worker, 90, range(16), terms=terms)
    lease = worker.granted(2, range(16), read_cache=False, terms=terms)
    assert worker.committed(lease, range(16)) == 16
    assert is_queued(worker.extend(lease, 5, 4)), "eight are used"
    rig.tick()
    assert [revoke.lease for revoke in rig.taken(Revoke)] == [lease.lease]
