"""Promised pages: a prompt that is not computed so far has a right to them, and not yet them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.pager.rig import Rig, Worker, code_of, fill_of, is_queued, key_of, table_of
from tests.unit.pager.steps import pinned
from tests.unit.pager.test_recovery import declare, line

from pagemesh.pager.tree.leaving import Why
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.pager_messages import Extended, Granted, Revoke

LONG = range(48)
"""A prompt of twelve pages, of which the tests are granted four at first."""
OTHER = range(100, 164)


def promised(rig: Rig) -> int:
    return rig.core.books.promises.page_count


def start(worker: Worker, number: int = 1, **how: Any) -> Granted:
    return worker.granted(number, LONG, first_tokens=16, **how)


def test_a_long_prompt_has_the_pages_that_it_fills_first_and_the_others_for_the_asking(
    rig: Rig, worker: Worker
) -> None:
    lease = start(worker)
    table = table_of(lease)
    assert len(table) == 4 and promised(rig) == 8
    assert rig.core.report().held_pages == 4 and rig.core.books.waste.unfilled_slots == 16
    for count in (8, 12):
        worker.committed(lease, LONG[: 4 * len(table)])
        table += table_of(worker.extended(lease, count, have=len(table)))
        assert promised(rig) == 12 - count
    assert worker.committed(lease, LONG) == 48 and len(set(table)) == 12


@pytest.mark.parametrize(("prompt", "pages"), [(24, 6), (25, 4), (4, 1)])
def test_a_short_prompt_and_a_short_rest_are_granted_whole(
    worker: Worker, prompt: int, pages: int
) -> None:
    lease = worker.granted(1, range(prompt), first_tokens=16)
    assert len(table_of(lease)) == pages


def test_what_is_cached_comes_on_top_of_the_first_pages(rig: Rig, worker: Worker) -> None:
    worker.release(worker.granted(1, LONG[:12]), LONG[:12])
    lease = start(worker, 2)
    assert lease.cached_tokens == 12 and len(table_of(lease)) == 7 and promised(rig) == 5


def test_nobody_is_admitted_to_what_is_promised(rig: Rig, worker: Worker) -> None:
    first = start(worker)
    assert is_queued(worker.admit(2, OTHER[:20])), "12 pages are free, 4 of them anybody's"
    assert code_of(worker.extend(first, 12)) == "Extended", "and who waits does not have them"
    worker.release(first, cache=False)
    (granted,) = rig.taken(Granted)
    assert granted.key == key_of(2)


def test_promised_pages_stay_cached_and_are_evicted_only_when_they_are_taken(
    rig: Rig, worker: Worker
) -> None:
    worker.release(worker.granted(1, OTHER[:48]), OTHER[:48])
    lease = start(worker, 2)
    pool = rig.core.books.pool
    assert (pool.free, pool.idle, pool.held) == (0, 12, 4)
    worker.extended(lease, 12, have=4)
    assert (pool.free, pool.idle, pool.held) == (0, 4, 12)


def test_reading_the_cache_that_a_promise_needs_waits_for_it(worker: Worker) -> None:
    worker.release(worker.granted(1, OTHER[:48]), OTHER[:48])
    start(worker, 2)
    assert is_queued(worker.admit(3, OTHER[:48]))


def test_prompts_half_computed_never_take_each_others_room(rig: Rig, worker: Worker) -> None:
    """The third would have fitted into what the first two have taken so far."""
    first, second = start(worker), worker.granted(2, range(200, 216), first_tokens=8)
    assert is_queued(worker.admit(3, OTHER[:4]))
    worker.extended(second, 4)
    worker.extended(first, 12)
    assert not rig.taken(Revoke) and not rig.taken(Granted)


def test_who_is_taken_back_gives_its_promise_back_at_once(rig: Rig, worker: Worker) -> None:
    lease = start(worker, 2)
    older = worker.admit(1, OTHER[:48])
    assert [notice.key for notice in rig.taken(Revoke)] == [lease.key] and not promised(rig)
    assert isinstance(older, Granted), "the twelve pages that nobody had taken suffice"


def test_who_ends_before_its_prompt_is_computed_leaves_its_promise_to_others(
    rig: Rig, worker: Worker
) -> None:
    lease = start(worker)
    worker.release(lease, LONG[:8])
    assert not promised(rig)
    assert len(table_of(worker.granted(2, OTHER))) == 16


def test_no_more_are_taken_back_than_held_and_promised_pages_are_missing(
    rig: Rig, worker: Worker
) -> None:
    kept, lost = worker.granted(2, OTHER[:16]), start(worker, 3)
    assert is_queued(worker.admit(1, range(200, 240))), "eight of its ten were not taken yet"
    assert [notice.key for notice in rig.taken(Revoke)] == [lost.key]
    assert kept.lease in rig.core.books.leases


def test_an_offered_lease_is_promised_nothing(rig: Rig, worker: Worker) -> None:
    lease = start(worker)
    assert is_queued(worker.admit(2, OTHER[:20]))
    worker.offered(lease, fill_of(LONG[:16]))
    assert not promised(rig) and [one.key for one in rig.taken(Granted)] == [key_of(2)]


def test_a_promise_is_used_pages_to_a_quota(rig: Rig, worker: Worker) -> None:
    terms = CacheTerms(tenant="alice", pages_max=14)
    lease = start(worker, terms=terms)
    assert rig.core.books.accounts.by_tenant["alice"].used_pages == 12
    assert is_queued(worker.admit(2, OTHER[:12], terms=terms))
    assert code_of(worker.extend(lease, 12)) == "Extended", "it is charged already"
    assert rig.core.books.accounts.by_tenant["alice"].used_pages == 12
    worker.release(lease, LONG)
    assert [one.key for one in rig.taken(Granted)] == [key_of(2)]


def test_a_tree_that_changes_hands_takes_its_promises_along(rig: Rig, worker: Worker) -> None:
    start(worker)
    terms = CacheTerms(tenant="alice", pages_max=16)
    worker.granted(2, OTHER[:4], terms=terms)
    assert rig.core.books.accounts.by_tenant["alice"].used_pages == 13
    assert rig.core.books.accounts.common.used_pages == 0


def test_more_than_is_promised_needs_room_for_the_rest_only(rig: Rig, worker: Worker) -> None:
    lease = start(worker)
    worker.granted(2, OTHER[:12])
    assert is_queued(worker.extend(lease, 14)), "twelve are its own and one is anybody's"
    assert code_of(worker.extend(lease, 13)) == "Extended" and not promised(rig)


def test_what_an_operator_pins_breaks_a_promise_which_then_is_waited_for(
    rig: Rig, worker: Worker
) -> None:
    worker.release(worker.granted(1, OTHER[:16]), OTHER[:16])
    lease = worker.granted(2, range(200, 264), first_tokens=16)
    pinned(rig, OTHER[:16])
    assert rig.core.books.room == -4
    worker.extended(lease, 12)
    assert is_queued(worker.extend(lease, 16))
    rig.tick()
    assert rig.core.books.pins == {}, "nobody holds anything before it, so the pin gives way"


def test_a_declared_lease_is_promised_what_its_admission_had_reserved(
    rig: Rig, worker: Worker
) -> None:
    lease = start(worker)
    rig.restart([worker.holder])
    held = line(lease, 1, list(LONG[:16]))
    assert declare(rig, worker, msgspec.structs.replace(held, promised_pages=8)) == []
    assert promised(rig) == 8 and is_queued(worker.admit(2, OTHER[:20]))
    assert code_of(worker.extend(lease, 12, have=4)) == "Extended"


def test_a_declared_lease_whose_pages_are_all_cached_grows_and_is_forked(
    rig: Rig, worker: Worker
) -> None:
    lease = start(worker)
    worker.committed(lease, LONG[:16])
    rig.restart([worker.holder])
    held = line(lease, 1, list(LONG[:16]))
    assert declare(rig, worker, msgspec.structs.replace(held, promised_pages=8)) == []
    (fifth,) = table_of(worker.extended(lease, 5, have=4))
    (copy,) = worker.forked(lease, fill_of(LONG[:18]), [1], 20).copies
    assert copy.source_page == fifth


def test_what_was_promised_before_a_restart_is_not_taken_from_others_meanwhile(
    rig: Rig, worker: Worker
) -> None:
    silent = Worker(rig, "silent", 2)
    worker.release(worker.granted(1, OTHER[:44]), OTHER[:44])
    lease, young = start(worker, 2), silent.granted(9, [900])
    rig.restart([worker.holder, silent.holder])
    held = line(lease, 2, list(LONG[:16]))
    declare(rig, worker, msgspec.structs.replace(held, promised_pages=8))
    assert is_queued(worker.extend(lease, 12, have=4)), "nothing may be evicted as yet"
    assert not rig.taken(Revoke)
    assert declare(rig, silent, line(young, 9, [])) == []
    assert [notice.lease for notice in rig.taken(Extended)] == [lease.lease]
    assert not rig.taken(Revoke) and not promised(rig)


def test_a_declaration_of_more_than_the_pool_has_is_lost(rig: Rig, worker: Worker) -> None:
    lease = start(worker)
    rig.restart([worker.holder])
    held = line(lease, 1, list(LONG[:16]))
    assert declare(rig, worker, msgspec.structs.replace(held, promised_pages=13)) == [lease.lease]


def test_who_waits_for_a_prefix_is_served_as_its_writer_goes_on_piece_by_piece(
    rig: Rig, worker: Worker
) -> None:
    lease = start(worker)
    assert is_queued(worker.admit(2, [*LONG[:32], 7], first_tokens=16))
    worker.committed(lease, LONG[:16])
    assert not rig.taken(Granted)
    worker.extended(lease, 8, have=4)
    worker.committed(lease, LONG[:32])
    (granted,) = rig.taken(Granted)
    assert granted.cached_tokens == 32


def test_what_leaves_for_a_promised_page_of_nobodys_quota_is_evicted_and_not_over_a_quota() -> None:
    rig = Rig(64)
    worker = Worker(rig, "prefill-1", 1)
    for number in range(1, 5):
        prompt = range(100 * number, 100 * number + 64)
        worker.release(worker.granted(number, prompt), prompt)
    assert rig.core.report().idle_pages == 64
    lease = worker.granted(9, range(900, 1020), first_tokens=16)
    worker.extended(lease, 8, have=4)
    left = rig.core.books.forest.left_pages
    assert promised(rig) == 22 and (left[Why.EVICTED], left[Why.QUOTA]) == (8, 0)


def test_who_is_promised_pages_has_them_though_somebody_older_waits(
    rig: Rig, worker: Worker
) -> None:
    worker.granted(1, OTHER[:40])
    lease = worker.granted(3, LONG[:24], first_tokens=8)
    assert promised(rig) == 4
    assert is_queued(worker.admit(2, range(200, 256))), "all others hold too little for it"
    assert len(table_of(worker.extended(lease, 6, have=2))) == 4
    assert promised(rig) == 0 and not rig.taken(Revoke)
