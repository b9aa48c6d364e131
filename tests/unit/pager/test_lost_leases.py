"""Leases that a worker declares and a new pager does not believe: their pages drain, no longer."""

from __future__ import annotations

import pytest
from tests.unit.pager.rig import LIMITS, ROOT, Rig, Worker, code_of, table_of
from tests.unit.pager.steps import invalidated
from tests.unit.pager.test_recovery import declare, line

from pagemesh.wire.pager_messages import Granted
from pagemesh.wire.pool_format import HeaderState


def lost_lease(rig: Rig, worker: Worker) -> Granted:
    """Of three pages, whose revocation word went between two lives of the pager."""
    lease = worker.granted(1, range(12))
    rig.restart([worker.holder])
    rig.words[lease.lease_slot] = 0
    rig.restart([worker.holder])
    return lease


def test_a_lost_lease_that_is_declared_twice_strands_no_page(rig: Rig, worker: Worker) -> None:
    lease = lost_lease(rig, worker)
    first, again = (line(lease, 1, [], table=table_of(lease)[at:]) for at in (0, 1))
    assert declare(rig, worker, first, again) == [lease.lease] * 2
    assert rig.core.report().draining_pages == 3
    worker.ack(lease)
    assert rig.core.report().free_pages == 16


def test_a_lost_lease_that_is_not_declared_again_strands_no_page(rig: Rig, worker: Worker) -> None:
    """Its holder gave it up before it heard that it was lost, so it has nothing to acknowledge."""
    lease = lost_lease(rig, worker)
    assert declare(rig, worker, line(lease, 1, [])) == [lease.lease]
    assert rig.core.report().draining_pages == 3
    assert declare(rig, worker) == []
    assert rig.core.report().free_pages == 16


def test_a_lost_lease_that_is_released_meanwhile_strands_no_page(rig: Rig, worker: Worker) -> None:
    lease = lost_lease(rig, worker)
    assert declare(rig, worker, line(lease, 1, [])) == [lease.lease]
    assert code_of(worker.release(lease)) == "Ok"
    assert rig.core.report().free_pages == 16


class TestLostAndTorn:
    """A lease that is lost, and whose header a pager tore that took it up: a running step may
    still write to the page, of which no header says whose it is."""

    @pytest.fixture
    def lease(self, rig: Rig, worker: Worker) -> Granted:
        lease = worker.granted(1, range(12))
        rig.restart([worker.holder])
        declare(rig, worker, line(lease, 1, []))
        rig.headers.states[table_of(lease)[1]] = HeaderState.INVALID
        rig.restart([worker.holder])
        invalidated(rig, "root", ROOT.hex())
        assert declare(rig, worker, line(lease, 1, [])) == [lease.lease]
        return lease

    def test_drains_until_its_worker_has_let_go_of_it(
        self, rig: Rig, worker: Worker, lease: Granted
    ) -> None:
        assert rig.core.report().draining_pages == 3
        worker.ack(lease)
        assert rig.core.report().free_pages == 16

    def test_drains_no_longer_than_its_worker_lives(self, rig: Rig, lease: Granted) -> None:
        assert rig.core.report().draining_pages == 3
        rig.die(1)
        assert rig.core.report().free_pages == 16

    def test_drains_though_its_worker_falls_silent(self, rig: Rig, lease: Granted) -> None:
        rig.tick(LIMITS.session_ttl_ms)
        assert not rig.core.report().session_count
        rig.die(9)
        assert rig.core.report().draining_pages == 3
        rig.die(1)
        assert rig.core.report().free_pages == 16

    def test_drains_no_longer_than_its_worker_names_it(
        self, rig: Rig, worker: Worker, lease: Granted
    ) -> None:
        assert rig.core.report().draining_pages == 3
        assert declare(rig, worker) == []
        assert rig.core.report().free_pages == 16


def test_a_lost_lease_of_which_no_header_is_whole_drains_until_its_worker_has_let_go_of_it(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, range(12))
    rig.headers.states[table_of(lease)] = HeaderState.INVALID
    rig.restart([worker.holder])
    invalidated(rig, "root", ROOT.hex())
    assert declare(rig, worker, line(lease, 1, [])) == [lease.lease]
    assert rig.core.report().draining_pages == 3
    worker.ack(lease)
    assert rig.core.report().free_pages == 16


def test_two_declared_leases_cannot_both_have_a_page(rig: Rig, worker: Worker) -> None:
    one, two = worker.granted(1, range(8)), worker.granted(2, range(100, 108))
    rig.restart([worker.holder])
    thief = line(two, 2, [], table=[*table_of(one)[:1], *table_of(two)])
    assert declare(rig, worker, line(one, 1, []), thief) == [two.lease]
    assert rig.core.report().held_pages == 2
    worker.ack(two)
    assert (rig.core.report().held_pages, rig.core.report().draining_pages) == (2, 0)
