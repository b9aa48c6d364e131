"""When a worker asks its pager for a session, and what one session leaves to the next."""

from __future__ import annotations

from tests.unit.engine_worker.bench import Bench, opened, submit

from pagemesh.engine.worker import events as ev
from pagemesh.wire.pager_messages import AckRevoke, Declare, Declared, Heartbeat, OpenSession


def openings(bench: Bench, count: int) -> list[float]:
    """When a session is asked for, which fails each time."""
    found: list[float] = []
    while len(found) < count:
        if "OpenSession" in bench.open_kinds():
            found.append(bench.now)
            bench.fail(OpenSession, "Busy")
        bench.tick(1)
    return found


def test_a_pager_that_is_not_heard_of_is_asked_for_a_session_in_no_hurry() -> None:
    bench = Bench()
    bench.tick()
    bench.fail(OpenSession, "DeadlineExceeded")
    bench.handle(ev.PagerLost())
    silent_ms = bench.now
    while "OpenSession" not in bench.open_kinds():
        bench.tick(10)
    assert bench.now - silent_ms >= bench.limits.retry_ms_max


def test_a_session_that_is_refused_again_and_again_is_asked_for_less_often() -> None:
    bench = Bench()
    bench.tick()
    first, second, third = openings(bench, 3)
    assert third - second == 2 * (second - first)


def test_a_session_that_was_opened_makes_up_for_the_tries_before_it() -> None:
    bench = Bench()
    bench.tick()
    *_, before, last = openings(bench, 4)
    while "OpenSession" not in bench.open_kinds():
        bench.tick(1)
    bench.answer(OpenSession, opened())
    bench.handle(ev.PagerChanged(2))
    bench.tick(1)
    first, second = openings(bench, 2)
    assert second - first < last - before


def test_a_beat_that_another_session_left_unanswered_is_not_the_last() -> None:
    bench = Bench().start()
    bench.tick(1_000)
    assert bench.asked(Heartbeat).epoch == 1
    bench.open.clear()  # nobody answers
    bench.handle(ev.PagerChanged(2))
    bench.tick()
    bench.answer(OpenSession, opened(epoch=2))
    bench.tick()
    bench.answer(Declare, Declared(lost=[]))
    bench.tick(2_000)
    assert bench.asked(Heartbeat).epoch == 2


def test_what_was_in_memory_that_is_gone_is_held_no_more() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    granted = bench.grant(cached=8)
    bench.handle(ev.PoolMissing(1))
    bench.step(51)
    assert bench.plan is None, "there is no memory to compute in"
    bench.tick(bench.limits.retry_ms_max)
    bench.answer(OpenSession, opened(epoch=2, pool_incarnation=2))
    bench.tick()
    told = [call.message for call in bench.open.values() if isinstance(call.message, AckRevoke)]
    assert [granted.lease] in [one.leases for one in told]
