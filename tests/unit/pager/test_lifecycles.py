"""Lifecycles of leases, tickets and sessions; the wait list."""

from __future__ import annotations

import pytest
from tests.unit.pager.rig import key_of, order_of

from pagemesh.pager.leases.lease import Lifecycle
from pagemesh.pager.leases.states import (
    LEASE_MOVES,
    SESSION_MOVES,
    TICKET_MOVES,
    IllegalMove,
    LeaseState,
    SessionState,
    TicketState,
)
from pagemesh.pager.leases.waiting import Waiter, WaitList, place_of
from pagemesh.wire.errors import Busy
from pagemesh.wire.pager_messages import Extend


def test_an_illegal_move_raises_with_the_history() -> None:
    life = Lifecycle(LEASE_MOVES, LeaseState.HELD, "grant")
    life.move(LeaseState.OFFERED, "offer")
    life.move(LeaseState.HELD, "redeem")
    life.move(LeaseState.ENDED, "release")
    with pytest.raises(
        IllegalMove, match="held by grant; offered by offer; held by redeem; ended by release"
    ):
        life.move(LeaseState.HELD, "redeem")


def test_nothing_leads_out_of_a_final_state() -> None:
    assert not LEASE_MOVES[LeaseState.ENDED]
    assert not SESSION_MOVES[SessionState.DEAD]
    for closed in (TicketState.REDEEMED, TicketState.CANCELLED, TicketState.EXPIRED):
        assert not TICKET_MOVES[closed]


def test_a_history_is_bounded_and_keeps_its_beginning() -> None:
    life = Lifecycle(SESSION_MOVES, SessionState.OPEN, "first")
    for _ in range(100):
        life.move(SessionState.EXPIRED, "silence")
        life.move(SessionState.OPEN, "open")
    assert len(life.history) <= 32 and life.history[0] == (SessionState.OPEN, "first")


def waiter(number: int, *, incarnation: int = 1, attempt: int = 1, forget_ms: int = 9) -> Waiter:
    order, key = order_of(number), key_of(number, attempt)
    message = Extend(
        key=key, worker="w", incarnation=incarnation, lease=1, have_pages=0, page_count=1
    )
    return Waiter(place_of(order, attempt, incarnation), message, order, forget_ms)


def test_waiters_stand_in_the_total_order_whoever_came_first() -> None:
    waiting = WaitList(8)
    for number in (5, 1, 3):
        waiting.put(waiter(number))
    assert [w.order.arrival_us for w in waiting] == [1, 3, 5]
    assert waiting.ahead_of(waiter(4).place) == 2
    waiting.check()


def test_asking_again_keeps_the_place_and_renews_the_patience() -> None:
    waiting = WaitList(8)
    waiting.put(waiter(1, forget_ms=10))
    waiting.put(waiter(2, forget_ms=10))
    waiting.put(waiter(1, forget_ms=20))
    waiting.forget_silent(15)
    assert [w.order.arrival_us for w in waiting] == [1]
    waiting.check()


def test_two_attempts_and_two_workers_of_one_sequence_wait_side_by_side() -> None:
    waiting = WaitList(8)
    for each in (waiter(1), waiter(1, attempt=2), waiter(1, incarnation=2)):
        waiting.put(each)
    assert len(waiting) == 3
    waiting.discard(1, key_of(1, 2))
    waiting.discard_session(2)
    assert [w.message.key.attempt for w in waiting] == [1]
    waiting.check()


def test_a_full_wait_list_refuses_newcomers_but_not_repeats() -> None:
    waiting = WaitList(1)
    waiting.put(waiter(2))
    with pytest.raises(Busy, match="1 sequences wait"):
        waiting.put(waiter(1))
    waiting.put(waiter(2, forget_ms=99))
    waiting.check()
