"""Admit, extend, wait: who gets which pages, and what is said about it."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.pager.rig import (
    LIMITS,
    ROOT,
    Rig,
    Worker,
    code_of,
    is_queued,
    key_of,
    order_of,
    table_of,
)
from tests.unit.pager.test_lifecycles import waiter

from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.messages import Refused
from pagemesh.wire.pager_messages import Admit, AskedAs, Extended, Granted, Queued
from pagemesh.wire.pool_format import ROOT_COUNT_MAX
from pagemesh.wire.tokens import pack


def test_the_second_request_reads_what_the_first_computed(rig: Rig, worker: Worker) -> None:
    first = worker.granted(1, range(10), 12)
    assert first.cached_tokens == 0 and table_of(first) == [0, 1, 2]
    worker.release(first, range(10))
    again = worker.granted(2, range(10), 12)
    assert again.cached_tokens == 8
    assert table_of(again)[:2] == table_of(first)[:2]


def test_the_last_token_is_always_computed_and_the_waterfall_says_so(worker: Worker) -> None:
    worker.release(worker.granted(1, range(8)), range(8))
    again = worker.granted(2, range(8))
    assert again.cached_tokens == 4
    waterfall = again.waterfall
    assert (waterfall.available_tokens, waterfall.selected_tokens) == (8, 4)
    assert waterfall.lost == {"last_token": 1, "partial_page": 3}


def test_a_page_shared_in_part_is_lost_as_partial_page(worker: Worker) -> None:
    worker.release(worker.granted(1, range(8)), range(8))
    other = worker.granted(2, [0, 1, 2, 3, 4, 5, 99, 98, 97])
    assert other.cached_tokens == 4
    assert other.waterfall.lost == {"partial_page": 2}


def test_a_request_that_may_not_read_the_cache_is_told_what_it_missed(worker: Worker) -> None:
    worker.release(worker.granted(1, range(8)), range(8))
    blind = worker.granted(2, range(9), read_cache=False)
    assert blind.cached_tokens == 0
    assert blind.waterfall.lost == {"not_read": 8}
    assert blind.waterfall.available_tokens == 8


def test_roots_share_nothing(worker: Worker) -> None:
    worker.release(worker.granted(1, range(8)), range(8))
    other = worker.admit(2, range(9), root=b"x" * 32)
    assert isinstance(other, Granted) and other.cached_tokens == 0


def test_asking_again_gets_the_same_lease(rig: Rig, worker: Worker) -> None:
    first = worker.granted(1, range(10))
    assert worker.granted(1, range(10)) == first
    assert len(rig.core.books.leases) == 1


def test_extend_counts_absolutely_so_a_repeat_adds_nothing(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(4))
    more = worker.extended(lease, 3, have=1)
    assert (more.first_index, len(table_of(more))) == (1, 2)
    assert worker.extended(lease, 3, have=1) == more
    assert rig.core.books.pool.held == 3
    assert more.granted_at > lease.granted_at


def test_what_can_never_fit_is_refused_with_both_numbers_and_what_helps(
    rig: Rig, worker: Worker
) -> None:
    refused = worker.admit(1, range(5), 16 * 4 + 1)
    assert isinstance(refused, Refused) and code_of(refused) == "NoCapacity"
    assert "17 pages" in refused.message and "16" in refused.message
    assert "shorten the prompt" in refused.message
    lease = worker.granted(2, range(5))
    assert code_of(worker.extend(lease, 17)) == "NoCapacity"
    assert rig.core.books.pool.held == 2


def test_a_sequence_alone_may_use_the_whole_pool_though_it_is_full_of_cache(
    rig: Rig, worker: Worker
) -> None:
    worker.release(worker.granted(1, range(64)), range(64))
    assert rig.core.books.pool.idle == 16
    other = worker.granted(2, range(100, 108), 64)
    assert len(table_of(other)) == 16 and rig.core.books.pool.evicted == 16


def test_a_matched_prefix_is_not_counted_as_room(rig: Rig, worker: Worker) -> None:
    worker.release(worker.granted(1, range(40)), range(40))
    holder = worker.granted(2, range(200, 224))
    assert rig.core.books.pool.free == 0
    answer = worker.admit(3, range(48))  # 10 idle pages match, 2 more are needed, 0 are to be had
    assert isinstance(answer, Queued)
    assert rig.core.books.pool.idle == 10, "waiting changes nothing"
    worker.release(holder)
    granted = rig.taken(Granted)
    assert [g.cached_tokens for g in granted] == [40]


@pytest.mark.parametrize(
    ("tokens", "reserve", "code"), [([], 4, "Malformed"), ([1, 2], 1, "Granted")]
)
def test_an_admission_needs_a_token(
    worker: Worker, tokens: list[int], reserve: int, code: str
) -> None:
    assert code_of(worker.admit(1, tokens, reserve)) == code


def test_no_time_left_is_said_at_once(worker: Worker) -> None:
    assert code_of(worker.admit(1, [1], deadline_ms=0)) == "DeadlineExceeded"


def test_without_a_session_of_this_life_nothing_is_granted(rig: Rig) -> None:
    stranger = Worker(rig, "stranger", 9, opened=False)
    assert code_of(stranger.admit(1, [1])) == "Stale"
    known = Worker(rig, "known", 10)
    rig.epoch += 1
    assert code_of(known.admit(1, [1])) == "Stale"
    rig.epoch -= 1
    assert code_of(known.admit(1, [1])) == "Granted"


class TestWaiting:
    """Ten pages of sixteen are held by an older sequence that nobody may preempt."""

    @pytest.fixture
    def old(self, worker: Worker) -> Granted:
        return worker.granted(0, range(500, 540))

    def test_a_waiter_is_served_by_push_when_pages_come_back(
        self, rig: Rig, worker: Worker, old: Granted
    ) -> None:
        queued = worker.admit(1, range(28))
        assert isinstance(queued, Queued) and queued.ahead_count == 0
        worker.release(old)
        [granted] = rig.taken(Granted)
        assert isinstance(granted, Granted) and granted.key == key_of(1)
        assert granted.asked_as == AskedAs(incarnation=1, epoch=1)
        again = worker.granted(1, range(28))
        assert again == msgspec.structs.replace(granted, asked_as=None)

    def test_a_younger_one_does_not_overtake_though_it_would_fit(
        self, rig: Rig, worker: Worker, old: Granted
    ) -> None:
        assert isinstance(worker.admit(1, range(28)), Queued)
        small = worker.admit(2, range(4))
        assert isinstance(small, Queued) and small.ahead_count == 1
        worker.release(old)
        assert [g.key for g in rig.taken(Granted)] == [
            key_of(1), key_of(2),
        ]  # fmt: skip

    def test_an_older_one_goes_first_though_it_came_later(
        self, rig: Rig, worker: Worker, old: Granted
    ) -> None:
        assert isinstance(worker.admit(5, range(40)), Queued)
        assert isinstance(worker.admit(3, range(40)), Queued)
        worker.release(old)
        assert [g.key for g in rig.taken(Granted)] == [key_of(3)]

    def test_a_silent_waiter_is_forgotten_and_blocks_nobody(
        self, rig: Rig, worker: Worker, old: Granted
    ) -> None:
        assert isinstance(worker.admit(1, range(28)), Queued)
        assert isinstance(worker.admit(2, range(4)), Queued)
        rig.tick(LIMITS.ask_again_ms)
        assert isinstance(worker.admit(2, range(4)), Queued)
        rig.tick(LIMITS.ask_again_ms)
        assert [g.key for g in rig.taken(Granted)] == [key_of(2)]

    def test_a_waiter_whose_worker_died_is_forgotten(
        self, rig: Rig, worker: Worker, old: Granted
    ) -> None:
        other = Worker(rig, "other", 2)
        assert isinstance(other.admit(1, range(28)), Queued)
        rig.die(2)
        assert code_of(worker.admit(2, range(4))) == "Granted"

    def test_an_extension_waits_like_an_admission_and_is_pushed(
        self, rig: Rig, worker: Worker, old: Granted
    ) -> None:
        lease = worker.granted(1, range(24))
        assert isinstance(worker.extend(lease, 8, have=6), Queued)
        worker.release(old)
        [more] = rig.taken(Extended)
        assert isinstance(more, Extended) and more.first_index == 6
        assert len(table_of(more)) == 2

    def test_a_waiter_holds_no_pages(self, rig: Rig, worker: Worker, old: Granted) -> None:
        before = rig.core.books.pool.free
        assert isinstance(worker.admit(1, range(28)), Queued)
        assert rig.core.books.pool.free == before

    def test_the_queue_is_bounded(self, rig: Rig, worker: Worker, old: Granted) -> None:
        for number in range(1, 1 + LIMITS.waiter_count_max):
            rig.core.books.waiting.put(waiter(number))
        assert code_of(worker.admit(10_000, range(28))) == "Busy"
        for number in range(1, 1 + LIMITS.waiter_count_max):
            rig.core.books.waiting.discard(1, key_of(number))


@pytest.mark.sources
def test_many_roots_of_one_tenant_do_not_drive_out_what_another_has() -> None:
    """As many salts as a client can think of, with a page each."""
    worker = Worker(Rig(ROOT_COUNT_MAX + 40), "w", 1)
    alice, bob = CacheTerms(tenant="alice"), CacheTerms(tenant="bob")
    kept = worker.granted(1, range(9), root=bytes(32), terms=bob)
    worker.release(kept, range(9))
    worker.rig.core.check = lambda: None  # type: ignore[method-assign]
    for number in range(2, ROOT_COUNT_MAX + 10):
        lease = worker.granted(number, range(5), root=number.to_bytes(32, "big"), terms=alice)
        worker.release(lease, range(5))
    del worker.rig.core.check
    assert len(worker.rig.core.books.forest.trees) == ROOT_COUNT_MAX
    assert worker.granted(9_000, range(9), root=bytes(32), terms=bob).cached_tokens == 8
    first = worker.granted(9_001, range(5), root=(2).to_bytes(32, "big"), terms=alice)
    assert first.cached_tokens == 0, "its own oldest made room"


def test_roots_seen_once_do_not_drive_out_the_one_in_use() -> None:
    rig = Rig(8)
    worker = Worker(rig, "w", 1)
    worker.release(worker.granted(1, range(8)), range(8))
    for number in range(2, ROOT_COUNT_MAX + 10):
        if number % 300 == 0:
            hit = worker.granted(number, range(9))
            assert hit.cached_tokens == 8
            worker.release(hit)
        answer = worker.admit(number + 5_000, [number], root=number.to_bytes(32, "big"))
        assert isinstance(answer, Granted)
        worker.release(answer)
    assert worker.granted(9_999, range(9)).cached_tokens == 8


def test_prompts_of_one_length_stay_runs_however_often_the_pool_turns_over() -> None:
    rig = Rig(1_024)
    worker, pieces = Worker(rig, "w", 1), []
    for number in range(64):
        tokens = range(number * 1_000, number * 1_000 + 256)
        lease = worker.granted(number, tokens)
        worker.extended(lease, 65, have=64)
        pieces.append(len(lease.extents) // 8)
        worker.release(lease, tokens)
    # Only what took the last free pages is in pieces, and who gets its pages after it.
    assert max(pieces) <= 3 and sum(count > 1 for count in pieces) <= 4
    assert rig.core.books.pool.evicted > 2_000


def test_free_pages_are_used_when_the_pool_is_too_small_to_leave_them(
    rig: Rig, worker: Worker
) -> None:
    worker.release(worker.granted(1, range(48)), range(48))
    lease = worker.granted(2, range(100, 128), 64)
    assert sorted(table_of(lease)) == list(range(16))
    assert rig.core.books.pool.evicted == 12


def test_no_sequence_waits_in_the_place_of_another(rig: Rig, worker: Worker) -> None:
    held = worker.granted(1, [1], 64)
    assert is_queued(worker.admit(2, [2], 64))
    message = Admit(
        key=key_of(3), order=order_of(2), worker=worker.name, incarnation=worker.incarnation,
        epoch=rig.epoch, root=ROOT, tokens=pack([3]), reserve_tokens=64, deadline_ms=1_000,
    )  # fmt: skip
    assert code_of(rig.ask(message)) == "Malformed"
    worker.release(held)
    [granted] = rig.taken(Granted)
    assert granted.key == key_of(2)


def test_who_wants_almost_all_pages_gets_the_last_free_ones_as_well() -> None:
    """Of a pool so large that a few free pages are left for growth, where there are enough idle."""
    rig = Rig(512)
    worker = Worker(rig, "w", 1)
    ids = list(range(4 * 510))
    worker.release(worker.granted(1, ids), ids)
    assert (rig.core.books.pool.free, rig.core.books.pool.idle) == (2, 510)
    assert len(table_of(worker.granted(2, [9_000], reserve=4 * 511))) == 511
    assert rig.core.books.pool.free == 1


def test_nothing_is_evicted_for_who_wants_all_that_is_free_and_no_more() -> None:
    rig = Rig(512)
    worker = Worker(rig, "w", 1)
    ids = list(range(4 * 510))
    worker.release(worker.granted(1, ids), ids)
    assert sorted(table_of(worker.granted(2, [9_000], reserve=8))) == [510, 511]
    assert (rig.core.books.pool.free, rig.core.books.pool.idle) == (0, 510)


def test_who_waits_for_longer_than_its_deadline_is_given_nothing(rig: Rig, worker: Worker) -> None:
    lease = worker.granted(1, range(64))
    assert is_queued(worker.admit(2, range(100, 104), deadline_ms=500))
    rig.tick(500)
    worker.release(lease, cache=False)
    assert not rig.taken(Granted) and rig.core.books.pool.free == 16


def test_a_few_free_pages_are_left_for_growth_while_others_can_be_evicted_whole() -> None:
    rig = Rig(512)
    worker = Worker(rig, "w", 1)
    ids = list(range(4 * 510))
    worker.release(worker.granted(1, ids), ids)
    lease = worker.granted(2, [9_000], reserve=16)
    first, *others = table_of(lease)
    assert others == [first + 1, first + 2, first + 3], "in one run"
    assert {510, 511}.isdisjoint(table_of(lease)) and rig.core.books.pool.free >= 2
