"""Tenants with quotas: what they may use, who waits for whom, and whose cache goes first."""

from __future__ import annotations

import dataclasses

import pytest
from tests.unit.pager.rig import LIMITS, Rig, Worker, code_of, fill_of, is_queued, key_of, table_of
from tests.unit.pager.steps import invalidated

from pagemesh.pager.events import KillHolder
from pagemesh.pager.retention.roots import uproot
from pagemesh.pager.tree.leaving import Why
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.messages import Refused
from pagemesh.wire.pager_messages import Extended, Granted, Offered, Revoke, TicketClosed

ALICE, BOB = b"a" * 32, b"b" * 32
EIGHT = CacheTerms(tenant="alice", pages_max=8)
HALF = CacheTerms(tenant="bob", pool_share=0.5)


def prompt(number: int, pages: int) -> list[int]:
    """A prompt of its own, that fills ``pages`` pages."""
    return [100 * number + at for at in range(4 * pages)]


def cache(worker: Worker, number: int, pages: int, terms: CacheTerms, root: bytes) -> None:
    ids = prompt(number, pages)
    worker.release(worker.granted(number, ids, root=root, terms=terms), ids)


def used(rig: Rig, tenant: str) -> tuple[int, int]:
    account = rig.core.books.accounts.by_tenant[tenant]
    return account.used_pages, account.idle_pages


def test_a_tenant_at_its_quota_waits_for_itself_and_for_nobody_else(
    rig: Rig, worker: Worker
) -> None:
    first = worker.granted(1, prompt(1, 6), root=ALICE, terms=EIGHT)
    assert is_queued(worker.admit(2, prompt(2, 3), root=ALICE, terms=EIGHT))
    assert rig.core.books.pool.free == 10, "there was room in the pool"
    worker.granted(3, prompt(3, 4), root=BOB, terms=HALF)
    worker.granted(4, prompt(4, 4))
    assert not rig.taken(Granted)
    worker.release(first, prompt(1, 6), cache=False)
    (granted,) = rig.taken(Granted)
    assert granted.key == key_of(2)


def test_pages_that_two_of_a_tenant_share_count_once(worker: Worker) -> None:
    shared = prompt(1, 6)
    worker.committed(worker.granted(1, [*shared, 9], root=ALICE, terms=EIGHT), shared)
    worker.granted(2, [*shared, 9], root=ALICE, terms=EIGHT)
    assert is_queued(worker.admit(3, [*shared, 9], root=ALICE, terms=EIGHT))


def test_what_a_tenant_has_cached_counts_when_it_is_used_again(worker: Worker) -> None:
    cache(worker, 1, 6, EIGHT, ALICE)
    worker.granted(2, prompt(2, 4), root=ALICE, terms=EIGHT)
    assert is_queued(worker.admit(3, [*prompt(1, 6), 9], root=ALICE, terms=EIGHT))


def test_the_order_within_a_tenant_is_kept_while_it_waits(rig: Rig, worker: Worker) -> None:
    first = worker.granted(1, prompt(1, 8), root=ALICE, terms=EIGHT)
    assert is_queued(worker.admit(3, prompt(3, 1), root=ALICE, terms=EIGHT))
    assert is_queued(worker.admit(2, prompt(2, 8), root=ALICE, terms=EIGHT))
    worker.release(first, cache=False)
    (granted,) = rig.taken(Granted)
    assert granted.key == key_of(2)
    worker.release(granted, cache=False)
    (granted,) = rig.taken(Granted)
    assert granted.key == key_of(3)


def test_nobody_goes_before_who_waits_for_the_same_tenant_though_it_wants_less(
    rig: Rig, worker: Worker
) -> None:
    first = worker.granted(1, prompt(1, 6), root=ALICE, terms=EIGHT)
    assert is_queued(worker.admit(2, prompt(2, 4), root=ALICE, terms=EIGHT))
    assert is_queued(worker.admit(3, prompt(3, 1), root=ALICE, terms=EIGHT))
    worker.release(first, cache=False)
    assert [granted.key for granted in rig.taken(Granted)] == [key_of(2), key_of(3)]


def test_what_is_promised_is_used_of_a_quota(rig: Rig, worker: Worker) -> None:
    worker.granted(1, prompt(1, 6), root=ALICE, terms=EIGHT, first_tokens=8)
    assert rig.core.report().held_pages == 2
    assert is_queued(worker.admit(2, prompt(2, 3), root=ALICE, terms=EIGHT))


def test_what_leaves_of_a_tenant_that_is_only_promised_more_than_its_quota_left_for_room(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, 4, EIGHT, ALICE)
    worker.granted(2, prompt(2, 5), root=ALICE, terms=EIGHT, first_tokens=8)
    assert used(rig, "alice") == (5, 4), "three of these lie in the cache or are free"
    worker.granted(3, prompt(3, 11))
    left = rig.core.books.forest.left_pages
    assert left[Why.QUOTA] == 0 < left[Why.EVICTED]


def test_an_older_one_takes_from_the_younger_of_its_own_tenant_only(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(9, prompt(9, 4), root=BOB, terms=HALF)
    young = worker.granted(5, prompt(5, 5), root=ALICE, terms=EIGHT)
    assert is_queued(worker.admit(1, prompt(1, 6), root=ALICE, terms=EIGHT))
    assert [revoke.key for revoke in rig.taken(Revoke)] == [young.key]
    worker.ack(young)
    (granted,) = rig.taken(Granted)
    assert granted.key == key_of(1)


def test_what_others_are_about_to_give_back_is_no_room_in_a_tenants_quota(rig: Rig) -> None:
    frozen, worker = Worker(rig, "frozen", 1), Worker(rig, "w", 2)
    frozen.granted(9, prompt(9, 8), root=BOB, terms=HALF)
    rig.tick(LIMITS.session_ttl_ms - 1)
    worker.open()
    rig.tick(1)
    assert rig.core.report().draining_pages == 8
    young = worker.granted(5, prompt(5, 5), root=ALICE, terms=EIGHT)
    assert is_queued(worker.admit(1, prompt(1, 6), root=ALICE, terms=EIGHT))
    assert [revoke.key for revoke in rig.taken(Revoke) if revoke.key == young.key]


def test_what_a_tenant_is_about_to_give_back_is_not_taken_from_it_again(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(5, prompt(5, 5), root=ALICE, terms=EIGHT)
    youngest = worker.granted(6, prompt(6, 2), root=ALICE, terms=EIGHT)
    for _ in range(3):
        assert is_queued(worker.admit(1, prompt(1, 3), root=ALICE, terms=EIGHT))
    assert [revoke.key for revoke in rig.taken(Revoke)] == [youngest.key]


def test_a_worker_that_gives_nothing_back_is_killed_for_a_tenant_that_waits_for_its_quota(
    rig: Rig, worker: Worker
) -> None:
    frozen, other = Worker(rig, "frozen", 5), Worker(rig, "other", 6)
    frozen.granted(5, prompt(5, 5), root=ALICE, terms=EIGHT)
    other.granted(9, prompt(9, 2), root=BOB, terms=HALF)
    killed: set[int] = set()
    for waited_ms in range(0, LIMITS.busy_drain_ms_max + 1_000, 500):
        assert is_queued(worker.admit(1, prompt(1, 6), root=ALICE, terms=EIGHT))
        for one in (worker, frozen, other):  # it hears everything, and lets go of nothing
            one.open()
        killed |= {one.incarnation for one in rig.tick(500) if isinstance(one, KillHolder)}
        assert bool(killed) == (waited_ms + 500 >= LIMITS.busy_drain_ms_max)
    assert killed == {5}
    assert rig.core.books.pool.free > 6, "there was room in the pool"


def test_nobody_is_killed_for_a_tenant_that_it_owes_nothing(rig: Rig, worker: Worker) -> None:
    frozen = Worker(rig, "frozen", 5)
    frozen.granted(5, prompt(5, 5), root=BOB, terms=HALF)
    rig.tick(LIMITS.session_ttl_ms - 1)
    worker.open()
    worker.granted(1, prompt(1, 8), root=ALICE, terms=EIGHT)
    for _ in range(0, LIMITS.drain_ms_max + 1_000, 500):
        assert is_queued(worker.admit(2, prompt(2, 6), root=ALICE, terms=EIGHT))
        worker.open()
        assert not [one for one in rig.tick(500) if isinstance(one, KillHolder)]


def test_growth_waits_for_the_quota_and_comes_when_there_is_room(rig: Rig, worker: Worker) -> None:
    one = worker.granted(1, prompt(1, 4), root=ALICE, terms=EIGHT)
    two = worker.granted(2, prompt(2, 4), root=ALICE, terms=EIGHT)
    assert is_queued(worker.extend(two, 5, 4))
    worker.release(one, cache=False)
    (extended,) = rig.taken(Extended)
    assert extended.key == two.key and len(table_of(extended)) == 1


def test_what_never_fits_a_quota_is_refused_with_both_numbers(rig: Rig, worker: Worker) -> None:
    answer = worker.admit(1, prompt(1, 9), root=ALICE, terms=EIGHT)
    assert isinstance(answer, Refused) and answer.code == "OverQuota"
    assert "9 pages" in answer.message and "may use 8" in answer.message
    assert not answer.retry_after_ms
    lease = worker.granted(2, prompt(2, 4), root=ALICE, terms=EIGHT)
    assert code_of(worker.extend(lease, 9, 4)) == "OverQuota"
    assert rig.core.books.pool.held == 4


def test_a_flood_of_one_tenant_leaves_the_cache_of_another_where_it_is(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, 6, HALF, BOB)
    for number in range(2, 12):
        cache(worker, number, 4, EIGHT, ALICE)
    assert used(rig, "bob") == (0, 6) and used(rig, "alice")[1] <= 10
    assert rig.core.books.forest.left_pages[Why.QUOTA] > 0
    again = worker.granted(20, [*prompt(1, 6), 9], root=BOB, terms=HALF)
    assert again.cached_tokens == 24


def test_room_that_nobody_else_wants_may_be_used_as_cache(rig: Rig, worker: Worker) -> None:
    for number in range(4):
        cache(worker, number, 4, EIGHT, ALICE)
    assert used(rig, "alice") == (0, 16)
    worker.granted(9, prompt(9, 8), root=BOB, terms=HALF)
    assert used(rig, "alice") == (0, 8)


def test_those_without_a_quota_share_what_the_quotas_leave(rig: Rig, worker: Worker) -> None:
    cache(worker, 1, 8, HALF, BOB)
    for number in range(2, 9):
        cache(worker, number, 4, CacheTerms(), ALICE)
    assert used(rig, "bob") == (0, 8)


def test_a_fork_and_growth_on_a_handover_stay_within_the_quota(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, prompt(1, 6), root=ALICE, terms=EIGHT)
    assert code_of(worker.fork(lease, fill_of(prompt(1, 6)), [1], 36)) == "NoCapacity"
    offered = worker.offered(lease, fill_of(prompt(1, 6)))
    taken = worker.redeemed(key_of(1), offered, reserve=64)
    assert len(table_of(taken)) == 8


def test_a_waiter_that_goes_away_is_forgotten(rig: Rig, worker: Worker) -> None:
    worker.granted(1, prompt(1, 8), root=ALICE, terms=EIGHT)
    other = Worker(rig, "other", 2)
    assert is_queued(other.admit(2, prompt(2, 2), root=ALICE, terms=EIGHT))
    assert rig.core.report().waiter_count == 1
    rig.die(2)
    assert rig.core.report().waiter_count == 0


def test_who_does_not_ask_again_is_forgotten(rig: Rig, worker: Worker) -> None:
    worker.granted(1, prompt(1, 8), root=ALICE, terms=EIGHT)
    assert is_queued(worker.admit(2, prompt(2, 2), root=ALICE, terms=EIGHT))
    for _ in range(3):
        rig.tick(1_000)
        worker.open()
    assert rig.core.report().waiter_count == 0


def test_after_a_restart_a_tree_is_its_tenants_once_it_was_asked_for(
    rig: Rig, worker: Worker
) -> None:
    cache(worker, 1, 6, HALF, BOB)
    rig.restart()
    worker = Worker(rig, "w", 2)
    assert not rig.core.books.accounts.by_tenant
    lease = worker.granted(2, [*prompt(1, 6), 9], root=BOB, terms=HALF)
    assert lease.cached_tokens == 24 and used(rig, "bob") == (7, 0)


def test_what_a_tenant_gets_back_after_a_restart_is_evicted_from_its_ends(
    rig: Rig, worker: Worker
) -> None:
    """Though its tree changes hands with all that is in it."""
    shared = prompt(1, 2)
    for number in (2, 3, 4):
        ids = [*shared, *prompt(number, 2)]
        worker.release(worker.granted(number, ids, root=ALICE, terms=EIGHT), ids)
    rig.restart()
    late = Worker(rig, "late", 2)
    late.release(late.granted(5, prompt(5, 1), root=ALICE, terms=EIGHT), cache=False)
    assert used(rig, "alice") == (0, 8)
    for pages in (10, 12, 16):
        late.release(late.granted(pages, prompt(6, pages)), cache=False)
    assert used(rig, "alice") == (0, 0)


@pytest.mark.parametrize("later", [CacheTerms(tenant="alice", pages_max=4), CacheTerms()])
def test_limits_that_changed_hold_from_the_next_request_on(
    rig: Rig, worker: Worker, later: CacheTerms
) -> None:
    worker.granted(1, prompt(1, 3), root=ALICE, terms=EIGHT)
    answer = worker.admit(2, prompt(2, 2), root=ALICE, terms=later)
    assert is_queued(answer) == later.has_quota


def test_a_tenant_without_anything_is_forgotten(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, prompt(1, 2), root=ALICE, terms=EIGHT)
    worker.release(lease, cache=False)
    rig.tick()
    assert list(rig.core.books.accounts.by_tenant) == ["alice"], "its tree is still planted"
    (tree,) = rig.core.books.forest.trees.values()
    uproot(rig.core.books, tree, Why.EVICTED)
    rig.core.books.accounts.tidy()
    assert not rig.core.books.accounts.by_tenant


def test_who_waits_for_its_tenant_is_served_though_nothing_else_of_it_is_left(
    rig: Rig, worker: Worker
) -> None:
    """A root that was invalidated goes, on a tick, with the ticket that it was used by last."""
    ids = prompt(1, 8)
    lease = worker.granted(1, ids, root=ALICE, terms=EIGHT)
    assert isinstance(worker.offer(lease, fill_of(ids), ttl_ms=1_000), Offered)
    assert is_queued(worker.admit(2, prompt(2, 4), root=ALICE, terms=EIGHT))
    invalidated(rig, "root", ALICE.hex())
    rig.tick(1_000)
    assert [granted.key for granted in rig.taken(Granted)] == [key_of(2)]


def test_who_finds_its_tenants_list_full_is_forgotten_and_nobody_is_hurt() -> None:
    rig = Rig(16, limits=dataclasses.replace(LIMITS, waiter_count_max=2))
    worker = Worker(rig, "w", 1)
    first = worker.granted(1, prompt(1, 4), root=ALICE, terms=EIGHT)
    others = worker.granted(0, prompt(9, 12))
    assert is_queued(worker.admit(2, prompt(2, 4), root=ALICE, terms=EIGHT)), "for room"
    assert is_queued(worker.extend(first, 6, 4)), "for room"
    for number in (3, 4):
        assert is_queued(worker.admit(number, prompt(number, 8), root=ALICE, terms=EIGHT))
    assert code_of(worker.admit(5, prompt(5, 8), root=ALICE, terms=EIGHT)) == "Busy"
    worker.release(others, cache=False)
    (extended,) = rig.taken(Extended)
    assert extended.key == first.key
    assert not rig.taken(Granted), "the second would use more than the quota now"
    assert rig.core.report().waiter_count == 2


def test_who_is_served_may_take_the_lease_of_the_next_who_waits_for_the_same_tenant(
    rig: Rig, worker: Worker
) -> None:
    twelve = CacheTerms(tenant="alice", pages_max=12)
    oldest = worker.granted(0, prompt(7, 6), root=ALICE, terms=twelve)
    worker.granted(1, prompt(1, 6))
    young = worker.granted(5, prompt(5, 4), root=ALICE, terms=twelve)
    assert is_queued(worker.admit(2, prompt(2, 8), root=ALICE, terms=twelve))
    assert is_queued(worker.extend(young, 7, 4))
    worker.release(oldest, cache=False)
    assert [revoke.key for revoke in rig.taken(Revoke)] == [young.key]
    worker.ack(young)
    (granted,) = rig.taken(Granted)
    assert granted.key == key_of(2)


def test_nothing_is_taken_back_for_who_could_not_wait_for_room_then() -> None:
    rig = Rig(16, limits=dataclasses.replace(LIMITS, waiter_count_max=1))
    worker = Worker(rig, "w", 1)
    twelve = CacheTerms(tenant="alice", pages_max=12)
    worker.granted(0, prompt(9, 10))
    young = worker.granted(5, prompt(5, 6), root=ALICE, terms=twelve)
    worker.offered(young, fill_of(()))
    assert is_queued(worker.admit(6, prompt(6, 1))), "nobody else may wait for room now"
    assert is_queued(worker.admit(2, prompt(2, 12), root=ALICE, terms=twelve))
    rig.tick(1)
    assert not rig.taken(TicketClosed)


def test_who_waits_is_served_once_its_prefix_is_cached_and_only_once(
    rig: Rig, worker: Worker
) -> None:
    shared = prompt(1, 6)
    first = worker.granted(1, [*shared, 9], root=ALICE, terms=EIGHT)
    assert is_queued(worker.admit(2, [*shared, 9], root=ALICE, terms=EIGHT))
    worker.committed(first, shared)
    (granted,) = rig.taken(Granted)
    assert granted.key == key_of(2) and granted.cached_tokens == 24
    worker.release(first, shared)
    assert not rig.taken(Granted)


def test_who_asks_again_under_a_larger_quota_waits_no_longer(rig: Rig, worker: Worker) -> None:
    first = worker.granted(1, prompt(1, 6), root=ALICE, terms=EIGHT)
    assert is_queued(worker.admit(2, prompt(2, 6), root=ALICE, terms=EIGHT))
    larger = CacheTerms(tenant="alice", pages_max=12)
    worker.granted(2, prompt(2, 6), root=ALICE, terms=larger)
    assert rig.core.report().waiter_count == 0
    worker.release(first, cache=False)
    assert not rig.taken(Granted), "it has its lease"


def test_who_asks_again_for_growth_under_a_larger_quota_waits_no_longer(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(1, prompt(1, 5), root=ALICE, terms=EIGHT)
    growing = worker.granted(2, prompt(2, 2), root=ALICE, terms=EIGHT)
    assert is_queued(worker.extend(growing, 4, have=2))
    larger = CacheTerms(tenant="alice", pages_max=12)
    worker.granted(0, prompt(3, 1), root=ALICE, terms=larger)
    worker.extended(growing, 4, have=2)
    assert rig.core.report().waiter_count == 0


def test_of_those_who_wait_in_a_tree_that_others_have_now_there_may_be_too_many_for_them() -> None:
    rig = Rig(32, limits=dataclasses.replace(LIMITS, waiter_count_max=1))
    worker = Worker(rig, "w", 1)
    x, y = CacheTerms(tenant="x", pages_max=8), CacheTerms(tenant="y", pages_max=4)
    worker.granted(1, range(24), root=b"r" * 32, terms=x)
    lease = worker.granted(2, range(100, 108), root=b"r" * 32, terms=x)
    assert is_queued(worker.extend(lease, 4)), "until its tenant uses less"
    worker.granted(3, range(200, 208), root=b"s" * 32, terms=y)
    assert is_queued(worker.admit(40, range(300, 316), root=b"s" * 32, terms=y))
    worker.granted(5, range(400, 404), root=b"r" * 32, terms=y)
    rig.tick(50)
    assert code_of(worker.extend(lease, 4)) == "Busy", "it asks again, and is told so"
