"""The kinds of waste, as sequences come, grow and go. Pages have four slots."""

from __future__ import annotations

import msgspec
from tests.unit.pager.rig import LIMITS, Rig, Worker, fill_of, key_of
from tests.unit.pager.test_recovery import declare, line

from pagemesh.pager.measures import Measures
from pagemesh.pager.retention.roots import uproot
from pagemesh.pager.tree.leaving import Why
from pagemesh.runtime.metrics import REGISTRY
from pagemesh.wire.cache_terms import CacheTerms


def waste(rig: Rig) -> tuple[int, int, int]:
    """Internal, reservation, contiguous."""
    found = rig.core.books.waste
    return found.internal_slots, found.reservation_slots, found.contiguous_slots


def test_a_prompt_is_reservation_until_it_is_computed_and_then_wastes_its_tail(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, range(10), tokens_max=30)
    assert waste(rig) == (0, 12, 30)
    worker.committed(lease, range(10), 8)
    assert waste(rig) == (0, 4, 22)
    worker.committed(lease, range(10))
    assert waste(rig) == (2, 0, 20)
    worker.release(lease, range(10))
    assert waste(rig) == (0, 0, 0)


def test_what_is_cached_wastes_nothing_however_many_read_it(rig: Rig, worker: Worker) -> None:
    worker.release(worker.granted(1, range(9)), range(9))
    worker.granted(2, range(9))
    worker.granted(3, range(9))
    assert waste(rig) == (0, 8, 8)


def test_pages_ahead_of_growth_are_reservation(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(4), reserve=8, tokens_max=40)
    worker.committed(lease, range(4))
    assert waste(rig) == (0, 4, 36)
    worker.extended(lease, 4, 2)
    assert waste(rig) == (0, 12, 36)
    worker.extended(lease, 11, 4)
    assert waste(rig) == (0, 40, 40), "it came to more than was said"


def test_forks_tickets_and_those_taken_back_are_counted_as_what_they_are(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, range(6), tokens_max=20)
    worker.forked(lease, fill_of(range(6)), [1], reserve=8)
    assert waste(rig) == (2, 4, 14 + 16)
    offered = worker.offered(lease, fill_of(range(6)))
    other = Worker(rig, "other", 2)
    other.redeemed(key_of(1), offered)
    assert waste(rig) == (2, 4, 14 + 16)
    rig.die(2)
    rig.die(1)
    assert waste(rig) == (0, 0, 0)


def test_a_tail_of_one_token_wastes_the_rest_of_its_page(rig: Rig, worker: Worker) -> None:
    worker.committed(worker.granted(1, range(9)), range(9))
    assert waste(rig) == (3, 0, 3)


def test_a_lease_that_is_taken_back_wastes_nothing_while_its_pages_drain(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(1, range(10), tokens_max=30)
    rig.tick(LIMITS.session_ttl_ms)
    assert rig.core.report().draining_pages == 3
    assert waste(rig) == (0, 0, 0)


def test_gauges_show_waste_and_tenants_and_counters_why_pages_left(
    rig: Rig, worker: Worker
) -> None:
    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"pagemesh_pager_{name}", labels)

    measures = Measures()
    before = value("evicted_pages_total", tier="pool", reason="invalidated") or 0.0
    terms = CacheTerms(tenant="alice", pages_max=9, ttl_s=60)
    lease = worker.granted(1, range(10), tokens_max=30, terms=terms)
    worker.committed(lease, range(10))
    measures.sample(rig.core.books)
    assert value("used_slots") == 12 and value("contiguous_wasted_slots") == 20
    assert value("wasted_slots", kind="internal") == 2
    assert value("wasted_slots", kind="reservation") == 0
    assert value("wasted_slots", kind="external") == 0
    states = ("used", "idle", "quota")
    assert [value("tenant_pages", tenant="alice", state=state) for state in states] == [3, 0, 9]
    worker.release(lease, range(10), cache=False)
    (tree,) = rig.core.books.forest.trees.values()
    uproot(rig.core.books, tree, Why.EVICTED)
    rig.core.books.accounts.tidy()
    measures.sample(rig.core.books)
    assert value("tenant_pages", tenant="alice", state="used") is None
    assert value("evicted_pages_total", tier="pool", reason="invalidated") == before + 2


def test_what_contiguous_allocation_would_waste_is_the_same_after_a_restart(
    rig: Rig, worker: Worker
) -> None:
    lease = worker.granted(1, range(10), tokens_max=30)
    worker.committed(lease, range(10))
    before = waste(rig)
    rig.restart([worker.holder])
    held = msgspec.structs.replace(line(lease, 1, list(range(10))), tokens_max=30)
    assert declare(rig, worker, held) == []
    assert waste(rig) == before
