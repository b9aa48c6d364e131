"""Nobody loses a lease for pages that this does not give to whoever waits."""

from __future__ import annotations

import pytest
from tests.unit.pager.rig import Rig, Worker, is_queued
from tests.unit.pager.test_preemption import revoked

from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms


@pytest.mark.parametrize("terms", [NO_TERMS, CacheTerms(tenant="alice", pages_max=12)])
def test_nobody_is_taken_back_for_pages_that_the_waiter_reads_itself(terms: CacheTerms) -> None:
    rig = Rig(12 if terms is NO_TERMS else 64)
    workers = [Worker(rig, f"w{number}", number) for number in (1, 2, 3)]
    common = list(range(32))
    workers[0].release(workers[0].granted(90, common, 32, terms=terms), common)
    workers[0].granted(1, [77] * 12, 12, terms=terms)
    workers[2].granted(3, [*common, 50], 33, terms=terms)
    assert is_queued(workers[1].admit(2, [*common, *[60] * 16], 48, terms=terms))
    assert not revoked(rig), "it would pin all but one of those pages"


def test_what_follows_the_part_of_an_edge_that_the_waiter_reads_is_gained() -> None:
    rig = Rig(12)
    workers = [Worker(rig, f"w{number}", number) for number in (1, 2)]
    common = list(range(33))
    workers[0].release(workers[0].granted(90, common, 33), common)
    lease = workers[1].granted(3, common, 33)
    assert is_queued(workers[0].admit(2, [*common[:16], *[60] * 24], 40))
    assert revoked(rig) == [lease.lease]
