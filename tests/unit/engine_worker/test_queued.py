"""Whoever was queued at the pager: what it takes for the answer, and what for a hint."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.engine_worker.bench import PREFILL, Bench, key, opened, submit

from pagemesh.engine.worker import events as ev
from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import (
    Admit,
    AskedAs,
    CancelTicket,
    Declare,
    Declared,
    DeclareWanted,
    Extend,
    Extended,
    Granted,
    Heartbeat,
    OpenSession,
    Queued,
    Revoke,
    TicketClosed,
)
from pagemesh.wire.tokens import pack_extents
from pagemesh.wire.work_messages import Attach

ME = 5
"""The incarnation of a bench's worker."""
QUEUED = Queued(key=key(), ahead_count=1, ask_again_ms=1_000)


def queued(bench: Bench, *, cached: int = 0, incarnation: int = ME, epoch: int = 1) -> Granted:
    """What the pager will grant to whoever asks in ``bench`` and is queued."""
    granted = bench.granted(bench.asked(Admit), cached=cached)
    bench.answer(Admit, QUEUED)
    asked_as = AskedAs(incarnation=incarnation, epoch=epoch)
    return msgspec.structs.replace(granted, asked_as=asked_as)


def waiting() -> Bench:
    bench = Bench().start()
    bench.ask(submit(10))
    return bench


def test_a_grant_that_comes_later_is_used_without_asking_again() -> None:
    bench = waiting()
    granted = queued(bench, cached=8)
    bench.notice(granted)
    assert bench.open_kinds() == [] and bench.plan is not None
    (row,) = bench.plan.rows
    assert (row.lease, row.start, len(row.tokens)) == (granted.lease, 8, 2)


def test_what_is_told_again_changes_nothing() -> None:
    bench = waiting()
    granted = queued(bench)
    bench.notice(granted)
    plan = bench.plan
    bench.notice(granted)
    assert bench.plan is plan and bench.open_kinds() == []


@pytest.mark.parametrize(("incarnation", "epoch"), [(ME - 1, 1), (ME, 0), (ME, 2)])
def test_what_another_life_was_granted_or_another_pager_granted_is_a_hint(
    incarnation: int, epoch: int
) -> None:
    bench = waiting()
    granted = queued(bench, incarnation=incarnation, epoch=epoch)
    bench.notice(granted)
    assert bench.plan is None
    bench.answer(Admit, granted)
    assert bench.plan is not None


def test_what_does_not_say_whose_it_is_is_a_hint() -> None:
    bench = waiting()
    bench.notice(msgspec.structs.replace(queued(bench), asked_as=None))
    assert bench.plan is None and bench.asked(Admit)


def test_what_comes_while_it_is_asked_again_is_left_to_that_answer() -> None:
    bench = waiting()
    granted = queued(bench)
    bench.tick(500)
    bench.notice(granted)
    assert bench.plan is None
    bench.answer(Admit, granted)
    assert bench.plan is not None


def test_who_had_pages_before_may_be_told_late_of_those() -> None:
    bench = waiting()
    first = queued(bench)
    bench.notice(first)
    bench.notice(Revoke(key=key(), lease=first.lease, reason="preempted", usage=""))
    bench.step(revoked=True)
    bench.answer(Admit, QUEUED)
    bench.notice(first)
    assert bench.plan is None and bench.asked(Admit)


def test_who_offered_its_pages_in_vain_may_be_told_late_of_those() -> None:
    bench = Bench(PREFILL).start()
    bench.ask(submit(10, decode="d"))
    first = queued(bench, cached=8)
    bench.notice(first)
    bench.step(51)
    ticket = bench.offered().ticket
    bench.fail(Attach, "Busy")
    bench.notice(TicketClosed(ticket=ticket, outcome="expired"))
    bench.answer(CancelTicket, Ok())
    bench.answer(Admit, QUEUED)
    bench.notice(first)
    assert bench.plan is None and bench.asked(Admit)


def test_what_was_granted_before_leases_were_declared_is_a_hint() -> None:
    bench = waiting()
    granted = queued(bench)
    bench.tick(1_000 - bench.now)
    bench.answer(Admit, QUEUED)
    bench.answer(Heartbeat, DeclareWanted(epoch=1))
    bench.notice(granted)
    assert bench.plan is None, "the list is about to be made"
    bench.tick()
    assert bench.asked(Declare).leases == []
    bench.notice(granted)
    assert bench.plan is None
    bench.answer(Declare, Declared(lost=[]))
    bench.notice(granted)
    assert bench.plan is None and bench.asked(Admit)


def test_another_pager_is_asked_anew() -> None:
    bench = waiting()
    granted = queued(bench)
    bench.handle(ev.PagerChanged(2))
    bench.tick()
    bench.answer(OpenSession, opened(2))
    bench.notice(granted)
    assert bench.plan is None
    bench.tick()
    bench.answer(Declare, Declared(lost=[]))
    bench.tick()
    assert bench.asked(Admit).epoch == 2


def test_a_waiter_asks_again_in_time_to_keep_its_place() -> None:
    bench = waiting()
    queued(bench)
    bench.tick(400)
    assert "Admit" not in bench.open_kinds()
    bench.tick(101)
    assert bench.asked(Admit)


def test_a_notice_that_overtakes_the_place_in_the_queue_is_not_waited_for_again() -> None:
    bench = waiting()
    granted = bench.granted(bench.asked(Admit))
    bench.notice(msgspec.structs.replace(granted, asked_as=AskedAs(incarnation=ME, epoch=1)))
    bench.answer(Admit, QUEUED)
    bench.answer(Admit, QUEUED)
    assert bench.open_kinds() == [], "it was told once"
    bench.tick(500)
    bench.answer(Admit, granted)
    assert bench.plan is not None


def test_an_extension_that_overtakes_its_place_in_the_queue_is_asked_for_again_at_once() -> None:
    bench = Bench(growth_pages=1).start()
    bench.ask(submit(10, max_tokens=30))
    granted = bench.grant()
    bench.step(50)
    while "Extend" not in bench.open_kinds():
        bench.step(50)
    have = bench.asked(Extend).have_pages
    extended = Extended(
        key=key(), lease=granted.lease, granted_at=granted.granted_at, first_index=have,
        extents=pack_extents(range(60, 61)),
    )  # fmt: skip
    bench.notice(extended)
    bench.answer(Extend, QUEUED)
    assert bench.asked(Extend).have_pages == have
    bench.answer(Extend, QUEUED)
    assert "Extend" not in bench.open_kinds(), "it was told once"
