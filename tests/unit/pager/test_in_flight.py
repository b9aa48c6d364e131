"""Prefixes in flight: computed once, whoever asks for them meanwhile."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.pager.rig import (
    LIMITS,
    Rig,
    Worker,
    code_of,
    fill_of,
    is_queued,
    key_of,
    table_of,
)

from pagemesh.pager.events import ProbeHolder
from pagemesh.pager.limits import PagerLimits
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.messages import LEVEL_US, SequenceKey
from pagemesh.wire.pager_messages import AskedAs, Granted, Revoke

PROMPT = range(14)
LATER = 1_000 * LIMITS.in_flight_together_ms + 1
"""Microseconds after which a sequence is clearly younger."""


@pytest.fixture
def rig() -> Rig:
    return Rig(64)


@pytest.fixture
def other(rig: Rig) -> Worker:
    return Worker(rig, "other", 2)


def pushed(rig: Rig) -> list[Granted]:
    return rig.taken(Granted)


def keys(granted: list[Granted]) -> list[SequenceKey]:
    return [one.key for one in granted]


def test_sixteen_prompts_at_once_are_computed_once_but_for_the_last_page(
    rig: Rig, worker: Worker
) -> None:
    first = worker.granted(1, PROMPT)
    for number in range(2, 17):
        assert is_queued(worker.admit(number, PROMPT))
    assert rig.core.books.pool.held == 4, "who waits holds nothing"
    assert worker.committed(first, PROMPT, 8) == 8
    assert not pushed(rig), "the third page is in flight still"
    worker.committed(first, PROMPT)
    granted = pushed(rig)
    assert keys(granted) == [key_of(number) for number in range(2, 17)]
    assert {one.cached_tokens for one in granted} == {12}
    assert all(table_of(one)[:3] == table_of(first)[:3] for one in granted)
    assert rig.core.books.in_flight.saved_tokens == 15 * 12


def test_the_waterfall_says_what_was_saved_and_how_long_it_took(rig: Rig, worker: Worker) -> None:
    first = worker.granted(1, PROMPT)
    worker.committed(first, PROMPT, 4)
    worker.admit(2, PROMPT)
    rig.now_ms += 30
    worker.committed(first, PROMPT)
    [granted] = pushed(rig)
    assert (granted.waterfall.awaited_tokens, granted.waterfall.awaited_ms) == (8, 30)
    assert granted.waterfall.delivered_tokens == granted.cached_tokens == 12
    assert granted.asked_as == AskedAs(incarnation=worker.incarnation, epoch=1)
    again = msgspec.structs.replace(worker.granted(2, PROMPT), asked_as=granted.asked_as)
    assert again == granted, "a repeat is told the same"


def test_a_prompt_waits_only_for_the_pages_it_has_in_common(rig: Rig, worker: Worker) -> None:
    first = worker.granted(1, range(30))
    assert is_queued(worker.admit(2, [*range(9), 99, 98, 97, 96]))
    assert code_of(worker.admit(3, [0, 1, 2, 99, 98])) == "Granted", "no whole page is common"
    worker.committed(first, range(30), 8)
    [granted] = pushed(rig)
    assert granted.cached_tokens == 8


def test_what_is_served_first_is_waited_for_by_those_who_share_more_with_it(
    rig: Rig, worker: Worker
) -> None:
    stem, branch = list(range(8)), [50, 51, 52, 53]
    first = worker.granted(1, [*stem, 9, 9, 9, 9, 9])
    second, third = [*stem, *branch, 1], [*stem, *branch, 2]
    assert is_queued(worker.admit(2, second)) and is_queued(worker.admit(3, third))
    worker.committed(first, [*stem, 9, 9, 9, 9, 9])
    [granted] = pushed(rig)
    assert granted.key == key_of(2) and granted.cached_tokens == 8
    worker.committed(granted, second)
    [granted] = pushed(rig)
    assert granted.key == key_of(3) and granted.cached_tokens == 12


def test_at_least_the_last_token_is_computed_so_a_prompt_of_one_page_waits_for_nobody(
    worker: Worker,
) -> None:
    worker.granted(1, range(4))
    assert code_of(worker.admit(2, range(4))) == "Granted"


def test_asking_again_goes_on_waiting_and_silence_ends_it(rig: Rig, worker: Worker) -> None:
    first = worker.granted(1, PROMPT)
    assert is_queued(worker.admit(2, PROMPT)) and is_queued(worker.admit(3, PROMPT))
    rig.tick(LIMITS.ask_again_ms)
    assert is_queued(worker.admit(2, PROMPT))
    rig.tick(LIMITS.ask_again_ms)
    worker.committed(first, PROMPT)
    assert keys(pushed(rig)) == [key_of(2)]


def test_who_waits_for_pages_in_flight_holds_up_nobody_behind_it(rig: Rig, worker: Worker) -> None:
    worker.granted(1, PROMPT)
    assert is_queued(worker.admit(2, PROMPT))
    assert code_of(worker.admit(3, range(70, 90))) == "Granted"


class TestTakingOver:
    """1 computes on ``other``, 2 and 3 wait on ``worker``."""

    @pytest.fixture
    def first(self, worker: Worker, other: Worker) -> Granted:
        first = other.granted(1, PROMPT)
        other.committed(first, PROMPT, 4)
        assert is_queued(worker.admit(3, PROMPT)) and is_queued(worker.admit(2, PROMPT))
        return first

    def take_over(self, rig: Rig, worker: Worker) -> None:
        """The oldest goes on where the first left off, and the other waits for it now."""
        [granted] = pushed(rig)
        assert granted.key == key_of(2) and granted.cached_tokens == 4
        worker.committed(granted, PROMPT)
        [granted] = pushed(rig)
        assert granted.key == key_of(3) and granted.cached_tokens == 12

    def test_when_its_process_dies(self, rig: Rig, worker: Worker, first: Granted) -> None:
        rig.die(2)
        self.take_over(rig, worker)

    def test_when_it_is_released(
        self, rig: Rig, worker: Worker, other: Worker, first: Granted
    ) -> None:
        other.release(first)
        self.take_over(rig, worker)

    def test_when_its_session_ends_in_silence(
        self, rig: Rig, worker: Worker, first: Granted
    ) -> None:
        for _ in range(5):
            rig.tick(1_000)
            worker.heartbeat()
            worker.admit(2, PROMPT)
            worker.admit(3, PROMPT)
        assert rig.taken(Revoke)
        self.take_over(rig, worker)

    def test_when_it_is_offered_before_it_is_complete(
        self, rig: Rig, worker: Worker, other: Worker, first: Granted
    ) -> None:
        other.offered(first, fill_of(PROMPT, 4))
        self.take_over(rig, worker)

    def test_when_its_worker_lives_and_commits_nothing(
        self, rig: Rig, worker: Worker, other: Worker, first: Granted
    ) -> None:
        for _ in range(LIMITS.in_flight_stall_ms_max // 1_000):
            assert not pushed(rig)
            rig.tick(1_000)
            other.heartbeat(first)
            worker.heartbeat()
            worker.admit(2, PROMPT)
            worker.admit(3, PROMPT)
        self.take_over(rig, worker)

    def test_but_not_while_it_goes_on_however_slowly(
        self, rig: Rig, worker: Worker, other: Worker, first: Granted
    ) -> None:
        for filled in (8, 14):
            for _ in range(LIMITS.in_flight_stall_ms_max // 1_000 - 1):
                rig.tick(1_000)
                other.heartbeat(first)
                worker.heartbeat()
                assert is_queued(worker.admit(2, PROMPT))
                assert is_queued(worker.admit(3, PROMPT))
            other.committed(first, PROMPT, filled)
        assert [one.cached_tokens for one in pushed(rig)] == [12, 12]

    def test_when_its_gateway_has_made_another_attempt(
        self, rig: Rig, worker: Worker, first: Granted
    ) -> None:
        again = worker.admit(1, PROMPT, attempt=2)
        assert isinstance(again, Granted), "nobody waits for an attempt that was given up"
        assert not pushed(rig), "the others wait for the new attempt"
        worker.committed(again, PROMPT)
        assert keys(pushed(rig)) == [key_of(2), key_of(3)]

    def test_who_is_waited_for_is_probed_so_that_its_death_is_noticed_soon(
        self, rig: Rig, first: Granted
    ) -> None:
        assert ProbeHolder(2) in rig.tick(LIMITS.probe_again_ms)
        assert ProbeHolder(2) not in rig.tick(1)

    def test_but_not_by_a_worker_that_is_gone(
        self, rig: Rig, worker: Worker, other: Worker, first: Granted
    ) -> None:
        rig.die(1)
        other.committed(first, PROMPT)
        assert not pushed(rig) and not rig.core.books.in_flight.waits


def test_whoever_waits_for_a_preempted_sequence_is_looked_at_anew() -> None:
    rig = Rig(8)
    worker = Worker(rig, "w", 1)
    young = worker.granted(LATER, PROMPT)
    worker.committed(young, PROMPT, 4)
    assert is_queued(worker.admit(LATER + 1, PROMPT))
    old = worker.admit(1, range(100, 120))
    assert is_queued(old), "it takes pages back, and waits until they are let go of"
    assert [r.lease for r in rig.taken(Revoke)] == [young.lease]
    assert is_queued(worker.admit(LATER + 1, PROMPT)), "behind the old one, for room"
    worker.ack(young)
    [granted] = pushed(rig)
    assert granted.key == key_of(1)
    worker.release(granted)
    [granted] = pushed(rig)
    assert granted.key == key_of(LATER + 1) and granted.cached_tokens == 4
    assert is_queued(worker.admit(LATER, PROMPT)), "who was preempted waits for it now"


def test_an_older_sequence_does_not_wait_and_is_told_what_that_cost(worker: Worker) -> None:
    worker.granted(LATER + 1, PROMPT)
    old = worker.granted(1, PROMPT)
    assert old.cached_tokens == 0
    assert old.waterfall.available_tokens == 12 and old.waterfall.lost == {"in_flight": 12}


def test_who_is_more_urgent_does_not_wait_for_who_is_less_so_unless_that_came_long_before(
    worker: Worker,
) -> None:
    worker.granted(1, PROMPT, priority=1)
    assert worker.granted(LEVEL_US - LATER, PROMPT).waterfall.lost == {"in_flight": 12}
    assert is_queued(worker.admit(LEVEL_US + 1, PROMPT))


def test_who_is_less_urgent_waits_for_who_is_more_so_though_that_came_after(
    worker: Worker,
) -> None:
    worker.granted(LEVEL_US, PROMPT)
    assert is_queued(worker.admit(1, PROMPT, priority=1))


def test_those_that_came_together_wait_for_each_other_in_any_order_and_the_oldest_is_next(
    rig: Rig, worker: Worker
) -> None:
    first = worker.granted(5, PROMPT)
    assert is_queued(worker.admit(6, PROMPT)) and is_queued(worker.admit(4, PROMPT))
    worker.release(first)
    assert keys(pushed(rig)) == [key_of(4)]


def test_a_prompt_that_may_not_read_the_cache_neither_waits_nor_is_waited_for(
    worker: Worker,
) -> None:
    worker.granted(1, PROMPT, read_cache=False)
    worker.granted(2, PROMPT)
    worker.granted(3, PROMPT, read_cache=False)


def test_roots_do_not_wait_for_each_other(worker: Worker) -> None:
    worker.granted(1, PROMPT)
    assert code_of(worker.admit(2, PROMPT, root=b"x" * 32)) == "Granted"


def test_what_is_drawn_is_not_waited_for(rig: Rig, worker: Worker) -> None:
    first = worker.granted(1, range(8), 24)
    worker.committed(first, range(8))
    worker.committed(first, range(14))
    assert code_of(worker.admit(2, range(18))) == "Granted"


def test_the_number_of_those_who_wait_is_bounded_and_the_next_one_computes() -> None:
    rig = Rig(64, limits=PagerLimits(lease_count_max=64, waiter_count_max=1))
    worker = Worker(rig, "w", 1)
    worker.granted(1, PROMPT)
    assert is_queued(worker.admit(2, PROMPT))
    assert worker.granted(3, PROMPT).waterfall.lost == {"in_flight": 12}


def test_a_restarted_pager_is_asked_anew_and_has_them_share_again(
    rig: Rig, worker: Worker, other: Worker
) -> None:
    first = other.granted(1, PROMPT)
    other.committed(first, PROMPT, 4)
    assert is_queued(worker.admit(2, PROMPT)) and is_queued(worker.admit(3, PROMPT))
    rig.restart([worker.holder])
    worker.open()
    second = worker.granted(2, PROMPT)
    assert second.cached_tokens == 4 and is_queued(worker.admit(3, PROMPT))


def test_a_served_waiter_without_room_queues_for_it_and_keeps_its_account() -> None:
    rig = Rig(8)
    worker = Worker(rig, "w", 1)
    first = worker.granted(1, PROMPT)
    assert is_queued(worker.admit(2, PROMPT, 28))
    filler = worker.granted(3, range(200, 212))
    worker.admit(2, PROMPT, 28)
    rig.now_ms += 20
    worker.committed(first, PROMPT)
    revoked = [r.lease for r in rig.taken(Revoke)]
    assert revoked == [filler.lease] and not pushed(rig)
    rig.now_ms += 500
    worker.ack(filler)
    [granted] = pushed(rig)
    assert (granted.waterfall.awaited_tokens, granted.waterfall.awaited_ms) == (12, 20)


def test_who_was_silent_for_too_long_is_given_nothing_though_no_tick_came(
    rig: Rig, worker: Worker, other: Worker
) -> None:
    first = worker.granted(1, PROMPT)
    assert is_queued(other.admit(2, PROMPT))
    rig.now_ms += 2 * LIMITS.ask_again_ms
    worker.committed(first, PROMPT)
    assert not pushed(rig) and len(rig.core.books.leases) == 1


def test_who_waits_for_what_is_computed_neither_takes_nor_holds_up_pages_of_its_tenant(
    worker: Worker, rig: Rig, other: Worker
) -> None:
    terms = CacheTerms(tenant="alice", pages_max=12)
    ids = list(range(40))
    worker.granted(2, ids, 44, terms=terms)
    for number in (1, 3):  # one is a little older, and came later
        assert is_queued(other.admit(number, ids, 44, terms=terms))
    books = rig.core.books
    assert books.in_flight.wait_count == 2 and not books.waiting.count
    assert not [one for one in rig.notices if isinstance(one.message, Revoke)]
    assert isinstance(other.admit(4, [9] * 4, 4, terms=terms), Granted)


def test_a_worker_that_commits_for_others_first_is_not_given_up(
    worker: Worker, rig: Rig, other: Worker
) -> None:
    long, ids = [7] * 150, list(range(40))
    first, second = worker.granted(1, long), worker.granted(2, ids)
    assert is_queued(other.admit(3, ids))
    for done in range(10, 140, 10):
        for _ in range(2):
            rig.tick(500)
            worker.heartbeat(first, second)
            other.heartbeat()
            assert is_queued(other.admit(3, ids))
        worker.committed(first, long[:done])
    assert not pushed(rig)
