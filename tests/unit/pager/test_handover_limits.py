"""How long a ticket may stand, and whom a fork may not overtake."""

from __future__ import annotations

import dataclasses

from tests.unit.pager.rig import LIMITS, ROOT, Rig, Worker, code_of, fill_of, is_queued

from pagemesh.wire.messages import Refused
from pagemesh.wire.pager_messages import Offered


def test_a_ticket_stands_no_longer_than_tickets_may(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(8))
    offered = worker.offer(lease, fill_of(range(8)), ttl_ms=10 * LIMITS.ticket_ttl_ms_max)
    assert isinstance(offered, Offered) and offered.handle.ttl_ms == LIMITS.ticket_ttl_ms_max
    rig.tick(LIMITS.ticket_ttl_ms_max)
    assert not rig.core.books.tickets and rig.core.books.pool.idle == 2


def test_a_closed_ticket_keeps_neither_the_tree_of_its_lease_nor_its_tenants_account(
    rig: Rig, worker: Worker
) -> None:
    worker.offered(worker.granted(1, range(8)), fill_of(range(8)), "a" * 32)
    tree = rig.core.books.forest.trees[ROOT]
    assert rig.core.books.tickets["a" * 32].lease.tree is tree
    worker.cancel("a" * 32)
    kept = rig.core.books.closed["a" * 32].lease
    assert kept.tree is not tree and kept.anchor is not tree.root


def test_a_fork_takes_no_pages_while_somebody_older_waits_for_them(
    rig: Rig, worker: Worker
) -> None:
    oldest = worker.granted(1, range(100, 140))
    lease = worker.granted(3, range(8))
    assert is_queued(worker.admit(2, range(200, 256))), "four are free, it wants fourteen"
    assert code_of(worker.fork(lease, fill_of(range(8)), [1], 12)) == "NoCapacity"
    worker.release(oldest, cache=False)
    assert not rig.core.books.waiting.count
    worker.forked(lease, fill_of(range(8)), [1], 8)


def test_children_that_there_are_no_leases_for_are_refused_for_that() -> None:
    rig = Rig(32, limits=dataclasses.replace(LIMITS, lease_count_max=2))
    worker = Worker(rig, "w", 1)
    lease = worker.granted(1, range(8))
    refused = worker.fork(lease, fill_of(range(8)), [1, 2], 8)
    assert isinstance(refused, Refused) and refused.code == "NoCapacity"
    assert "too many leases are open for 2 more" in refused.message
    worker.forked(lease, fill_of(range(8)), [1], 8)
