"""What a worker and its pager say to each other is enough for both, and no more than that."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tests.unit.engine_worker.bench import (
    PREFILL,
    Bench,
    at_fork,
    attach,
    key,
    opened,
    result_of,
    submit,
)
from tests.unit.engine_worker.test_away import AWAY, LIMITS, wait

from pagemesh.engine.worker import events as ev
from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import (
    NO_LEASE,
    AckRevoke,
    Admit,
    Declare,
    Declared,
    Fork,
    Heartbeat,
    Offer,
    OpenSession,
    Queued,
    Redeem,
    Release,
    Revoke,
)
from pagemesh.wire.work_messages import Abort

QUEUED = Queued(key=key(), ahead_count=1, ask_again_ms=1_000)
STOP = Abort(request=key().request, attempt=1, reason="stop")


def test_a_pager_that_opens_no_session_is_not_waited_for_longer_than_one_that_is_gone() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.handle(ev.PagerChanged(2))
    until = bench.now + LIMITS.pager_wait_ms_max - 1_000
    while bench.now < until:
        bench.tick(500.0)
        if "OpenSession" in bench.open_kinds():
            bench.fail(OpenSession, "NoCapacity")
    assert not bench.frames, "it may find room"
    wait(bench, 1_500)
    assert bench.frames[-1].error == AWAY
    bench.answer(OpenSession, opened(epoch=2))
    bench.tick(1.0)
    bench.answer(Declare, Declared(lost=[]))
    assert bench.core.ready


def test_a_pager_that_takes_no_declaration_is_not_waited_for_either() -> None:
    """It opens each session anew, and no page can be asked for before it has one."""
    bench = Bench().start()
    bench.ask(submit(10))
    bench.handle(ev.PagerChanged(2))
    until = bench.now + LIMITS.pager_wait_ms_max + 1_000
    while bench.now < until:
        bench.tick(500.0)
        if "OpenSession" in bench.open_kinds():
            bench.answer(OpenSession, opened(epoch=2))
        if "Declare" in bench.open_kinds():
            bench.fail(Declare, "Stale")
    assert bench.frames[-1].error == AWAY and not bench.core.ready


def test_who_ended_before_it_was_queued_leaves_the_queue() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.ask(STOP)
    bench.answer(Admit, QUEUED)
    assert bench.asked(Release).lease == NO_LEASE


def test_a_heartbeat_waits_for_a_moment_in_which_no_lease_changes_hands() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    asked = bench.asked(Admit)
    due = bench.now + 1_100
    while bench.now < due:
        bench.tick(20.0)
    assert "Heartbeat" not in bench.open_kinds()
    bench.answer(Admit, bench.granted(asked))
    bench.tick(20.0)
    assert bench.asked(Heartbeat).lease_count == 1


def test_a_heartbeat_does_not_wait_for_that_for_long() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    due = bench.now + 1_000 + LIMITS.beat_late_ms_max + 40
    while bench.now < due:
        bench.tick(20.0)
    assert "Heartbeat" in bench.open_kinds()


def test_whoever_ends_while_it_is_queued_leaves_the_queue() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.answer(Admit, QUEUED)
    bench.ask(STOP)
    left = bench.asked(Release)
    assert (left.lease, left.key) == (NO_LEASE, key())
    bench.answer(Release, Ok())
    assert bench.core.idle


def test_whoever_ends_before_it_is_queued_or_with_pages_leaves_no_queue() -> None:
    asking, granted = Bench().start(), Bench().start()
    for bench in (asking, granted):
        bench.ask(submit(10))
    granted.answer(Admit, QUEUED)
    granted.tick(1_000.0)
    granted.grant()
    for bench in (asking, granted):
        bench.ask(STOP)
        bench.step() if bench.plan is not None else None
        released = [bench.asked(Release).lease] if "Release" in bench.open_kinds() else []
        assert NO_LEASE not in released


def test_a_ticket_that_is_over_says_nothing_of_the_session() -> None:
    bench = Bench().start()
    bench.ask(attach())
    bench.fail(Redeem, "TicketOver")
    bench.tick()
    assert "OpenSession" not in bench.open_kinds() and bench.core.ready
    [frame] = bench.frames
    assert frame.error is not None and frame.error.code == "Stale"


def test_a_revocation_that_overtakes_what_was_redeemed_says_nothing_of_the_session() -> None:
    bench = Bench().start()
    bench.ask(attach())
    bench.notice(Revoke(key=key(), lease=900, reason="preempted"))
    granted = bench.granted(bench.asked(Redeem), cached=10)
    bench.answer(Redeem, msgspec.structs.replace(granted, lease=900))
    bench.tick()
    assert "OpenSession" not in bench.open_kinds() and bench.asked(Admit)


def test_a_lease_that_only_a_step_found_over_is_given_back_too() -> None:
    """The pager may hold it still: nobody would have told it, and it would grant it again."""
    bench = Bench().start()
    bench.ask(submit(10))
    lease = bench.grant(cached=8).lease
    bench.step(revoked=True)
    assert bench.asked(Release).lease == lease
    assert bench.asked(AckRevoke).leases == [lease]


def test_a_lease_that_the_pager_took_back_is_acknowledged_alone() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    lease = bench.grant(cached=8).lease
    bench.notice(Revoke(key=key(), lease=lease, reason="preempted"))
    bench.step(revoked=True)
    assert bench.asked(AckRevoke).leases == [lease]
    assert "Release" not in bench.open_kinds()


def test_what_is_owed_to_a_pager_that_does_not_answer_is_sent_less_and_less_often() -> None:
    bench = Bench().start()
    bench.ask(submit(10, max_tokens=1))
    bench.grant(cached=8)
    bench.step(51)
    sent: list[float] = []
    while len(sent) < 3:
        if "Release" in bench.open_kinds():
            sent.append(bench.now)
            bench.fail(Release, "Busy")
        bench.tick(1)
    first, second, third = sent
    assert third - second == 2 * (second - first)


def test_whoever_is_told_again_and_again_that_there_are_too_many_tickets_goes_on_here() -> None:
    bench = Bench(PREFILL).start()
    bench.ask(submit(10, decode="d"))
    bench.grant(cached=8)
    bench.step(51)
    for _ in range(3):
        assert bench.plan is None, "a moment of much work is no reason"
        bench.fail(Offer, "Busy")
        bench.tick()
    assert bench.plan is not None and [row.key for row in bench.plan.rows] == [key()]
    assert "Attach" not in bench.open_kinds()


@pytest.mark.parametrize("how", ["fork refused", "preempted", "handed over"])
def test_what_is_cached_of_a_prompt_that_was_admitted_before_is_no_news(how: str) -> None:
    if how == "fork refused":
        bench, _ = at_fork()
        bench.fail(Fork, "NoCapacity")
        bench.tick()
    elif how == "preempted":
        bench = Bench().start()
        bench.ask(submit(10))
        lease = bench.grant(cached=4).lease
        bench.notice(Revoke(key=key(), lease=lease, reason="preempted"))
        bench.step(revoked=True)
    else:
        bench = Bench().start()
        bench.ask(attach())
        bench.notice(Revoke(key=key(), lease=900, reason="preempted"))
        granted = bench.granted(bench.asked(Redeem), cached=10)
        bench.answer(Redeem, msgspec.structs.replace(granted, lease=900))
    assert bench.asked(Admit).again


def test_the_prompt_of_a_choice_whose_leader_ends_at_its_first_token_is_no_news() -> None:
    bench = Bench().start()
    bench.ask(submit(10, choices=2, stop=9))
    assert not bench.asked(Admit).again
    bench.grant(cached=8)
    assert bench.plan is not None
    result = result_of(bench.plan, 51)
    [row] = result.rows
    row = replace(row, drawn=(replace(row.drawn[0], token=9), *row.drawn[1:]))
    bench.plan = None
    bench.handle(ev.StepsFinished((replace(result, rows=(row,)),)))
    bench.tick()
    asked = bench.asked(Admit)
    assert (asked.key, asked.again) == (key(1), True)
