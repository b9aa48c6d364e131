"""A pager that evicts all the time takes no more memory for it."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
from ops.bench.pager_adapter import INCARNATION, WORKER, PagerAdapter, Request
from tests.unit.pager.rig import Rig, Worker
from tests.unit.pager.steps import cache, invalidated

from pagemesh.pager.eviction import POLICIES, EvictionPolicy, make_policy
from pagemesh.pager.eviction.ghosts import Ghost, GhostBudget, Ghosts
from pagemesh.pager.leases.ended import EndedLeases
from pagemesh.pager.limits import PagerLimits
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.pager_messages import Fill, Granted, Offer, Offered, Redeem
from pagemesh.wire.tokens import pack

POOL_PAGES, PAGE_SIZE = 128, 4
SETTLED_REQUESTS, MORE_REQUESTS = 1_500, 1_500
GROWTH_BYTES_MAX = 24_000
"""Of things that come and go: less than 16 bytes a request."""


class _SmallTables(PagerAdapter):
    """Remembers few things that are over, so that a short test fills every table."""

    limits = PagerLimits(ended_count_max=64)

    def hand_over(self, request: Request) -> None:
        """The lease goes to a ticket, and is taken back by it."""
        offered = self.ask(
            Offer(
                key=request.key, worker=WORKER, incarnation=INCARNATION, epoch=self._epoch,
                lease=request.lease, ticket=request.key.request, ttl_ms=1_000,
                fill=Fill(filled_tokens=request.token_count, first_token=request.token_count),
            )
        )  # fmt: skip
        assert isinstance(offered, Offered), offered
        granted = self.ask(
            Redeem(
                key=request.key, worker=WORKER, incarnation=INCARNATION, epoch=self._epoch,
                ticket=offered.ticket, handle=offered.handle, reserve_tokens=request.token_count,
            )
        )  # fmt: skip
        assert isinstance(granted, Granted), granted


def serve(adapter: _SmallTables, request_count: int, dice: random.Random) -> None:
    """Prompts of which half begin as one of a few others do."""
    for number in range(request_count):
        first = dice.randrange(4) if number % 2 else dice.randrange(1 << 30)
        ids = [first] * 8 * PAGE_SIZE + [dice.randrange(1 << 30) for _ in range(5 * PAGE_SIZE)]
        request = adapter.prepare(pack(ids))
        adapter.match(request)
        adapter.alloc(request)
        adapter.commit(request)
        if number % 3 == 0:
            adapter.hand_over(request)
        adapter.release(request)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_grows_with_the_requests_that_were_served(policy: str) -> None:
    dice = random.Random(policy)
    adapter = type("_", (_SmallTables,), {"policy_name": policy})(POOL_PAGES, PAGE_SIZE)
    tracemalloc.start()
    try:
        serve(adapter, SETTLED_REQUESTS, dice)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        serve(adapter, MORE_REQUESTS, dice)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert adapter.core.books.pool.evicted > 10 * POOL_PAGES
    assert grown < GROWTH_BYTES_MAX


def test_the_last_leases_that_ended_are_known_and_who_held_them() -> None:
    ended = EndedLeases(3)
    assert not ended.was_held_by(0, 0)
    for lease in range(1, 6):
        ended.add(lease, 10 * lease)
    assert [lease for lease in range(7) if ended.was_held_by(lease, 10 * lease)] == [3, 4, 5]
    assert not ended.was_held_by(4, 30)


def test_ghosts_that_return_leave_nothing_behind() -> None:
    ghosts = Ghosts(100, 8, lambda _ghost: None)
    for place in range(1_000):
        ghosts.put(Ghost(place, place, 0, 0, 0, 1))
        assert ghosts.take(place) is not None
    assert not len(ghosts) and len(ghosts._order) < 100


def test_whose_ghosts_are_more_than_an_equal_part_of_the_budget_makes_room() -> None:
    budget = GhostBudget(8)
    one, other = (Ghosts(100, 100, lambda _ghost: None, budget) for _ in range(2))

    def put(ghosts: Ghosts, count: int) -> tuple[int, int]:
        for place in range(count):
            ghosts.put(Ghost(place, place, 0, 0, 0, 1))
        return len(one), len(other)

    assert put(one, 20) == (8, 0)
    assert put(other, 3) == (8, 3), "nobody loses what is within its part"
    assert put(one, 9) == (5, 3)
    assert put(other, 20) == (5, 4) and put(one, 9) == (4, 4)
    one.check()
    other.close()
    assert put(one, 20) == (8, 4), "it left all to the first"


def test_what_all_tenants_remember_has_a_common_bound() -> None:
    class Sharing(Rig):
        budget = GhostBudget(12)

        def new_policy(self, page_count: int) -> EvictionPolicy:
            return make_policy("learned", page_count, self.budget)

    rig = Sharing(16)
    worker = Worker(rig, "w", 1)
    roots = [bytes([tenant]) * 32 for tenant in range(4)]
    for number in range(120):
        tenant, ids = number % 4, range(8 * number, 8 * number + 8)
        terms = CacheTerms(tenant=f"t{tenant}", pages_max=8)
        cache(worker, number, ids, root=roots[tenant], terms=terms)
    assert 12 <= rig.budget.count < 12 + 4
    for root in roots:
        invalidated(rig, "root", root.hex())
    rig.tick(1_000)
    assert not rig.core.books.accounts.by_tenant
    assert (rig.budget.count, rig.budget.sharer_count) == (0, 1), "the common account is left"


def test_a_ghost_that_gets_longer_is_the_latest_and_counts_once() -> None:
    forgotten: list[tuple[int, int]] = []
    ghosts = Ghosts(100, 3, lambda ghost: forgotten.append((ghost.place, ghost.page_count)))
    first = Ghost(1, 1, 0, 0, 0, 4)
    for ghost in (first, Ghost(2, 2, 0, 0, 0, 4)):
        ghosts.put(ghost)
    longer = ghosts.lengthen(first, 3, 2)
    assert longer is not None and longer.page_count == 6 and ghosts.lengthen(first, 4, 1) is None
    for place in (5, 6, 7):
        ghosts.put(Ghost(place, place, 0, 0, 0, 1))
    assert forgotten == [(2, 4), (3, 6)]
