"""A pager that is gone and does not come back: nobody waits for it in silence."""

from __future__ import annotations

from tests.unit.engine_worker.bench import PREFILL, Bench, attach, submit

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.settings import WorkerLimits
from pagemesh.wire.pager_messages import OpenSession
from pagemesh.wire.work_messages import Failure

LIMITS = WorkerLimits()
AWAY = Failure(code="Busy", message="the pager is away")


def wait(bench: Bench, ms: float) -> None:
    until = bench.now + ms
    while bench.now < until:
        bench.tick(500.0)


def test_a_worker_whose_pager_is_gone_takes_nothing_new_until_it_is_back() -> None:
    bench = Bench().start()
    bench.handle(ev.PagerLost())
    wait(bench, LIMITS.pager_away_ms - 1_000)
    assert bench.core.ready, "a pager that is started again is back by then"
    wait(bench, 1_000)
    assert not bench.core.ready
    bench.handle(ev.PagerChanged(1))
    assert bench.core.ready, "it was never gone, only silent"


def test_what_waits_for_pages_of_a_pager_that_is_gone_is_given_back() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.handle(ev.PagerLost())
    wait(bench, LIMITS.pager_wait_ms_max - 1_000)
    assert not bench.frames
    wait(bench, 1_500)
    [frame] = bench.frames
    assert frame.finish == "error" and frame.error is not None
    assert (frame.error.code, frame.error.message) == ("Busy", "the pager is away")


def refused(bench: Bench, ms: float) -> None:
    """Wait, while the pager opens no session."""
    until = bench.now + ms
    while bench.now < until:
        bench.tick(500.0)
        if "OpenSession" in bench.open_kinds():
            bench.fail(OpenSession, "Busy")


def test_a_pager_is_away_since_the_first_sign_of_it() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.handle(ev.PagerChanged(2))
    refused(bench, LIMITS.pager_wait_ms_max / 2)
    bench.handle(ev.PagerLost())
    refused(bench, LIMITS.pager_wait_ms_max / 2 - 1_000)
    assert not bench.frames
    refused(bench, 1_500)
    assert [frame.error for frame in bench.frames] == [AWAY]


def away(bench: Bench) -> Failure | None:
    """What the gateway is told once the pager has been away for long."""
    before = len(bench.frames)
    bench.handle(ev.PagerLost())
    wait(bench, LIMITS.pager_wait_ms_max - 1_000)
    assert len(bench.frames) == before, "it may come back"
    wait(bench, 1_500)
    return bench.frames[-1].error if len(bench.frames) > before else None


def test_who_draws_and_has_no_slot_for_more_is_given_back() -> None:
    bench = Bench().start()
    bench.ask(submit(10, max_tokens=40))
    bench.grant(pages=3)  # 12 slots
    while bench.plan is not None:
        bench.step()
    assert away(bench) == AWAY
    assert bench.tokens() == [50] * 3, "what was drawn is the gateway's"


def test_whose_prompt_has_only_part_of_its_pages_is_given_back() -> None:
    bench = Bench().start()
    bench.ask(submit(30))
    bench.grant(pages=4)
    while bench.plan is not None:
        bench.step()
    assert away(bench) == AWAY


def test_who_asked_for_a_ticket_is_given_back() -> None:
    bench = Bench(PREFILL).start()
    bench.ask(submit(10, decode="d"))
    bench.grant()
    while bench.plan is not None:
        bench.step()
    assert "Offer" in bench.open_kinds() and away(bench) == AWAY


def test_who_wants_a_ticket_redeemed_is_given_back() -> None:
    bench = Bench().start()
    bench.ask(attach())
    assert "Redeem" in bench.open_kinds() and away(bench) == AWAY


def test_who_forks_is_given_back_with_all_its_choices() -> None:
    bench = Bench().start()
    bench.ask(submit(10, choices=2))
    bench.grant()
    while bench.plan is not None:
        bench.step()
    assert "Fork" in bench.open_kinds() and away(bench) == AWAY
    assert {frame.key.choice for frame in bench.frames} == {0, 1}


def test_a_step_that_takes_long_is_waited_for_without_a_pager() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.grant(pages=3)
    assert away(bench) is None and bench.plan is not None


def test_who_has_pages_goes_on_without_a_pager() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.grant()
    bench.handle(ev.PagerLost())
    wait(bench, LIMITS.pager_wait_ms_max + 1_000)
    assert not any(frame.error for frame in bench.frames)
    assert "Admit" not in bench.open_kinds()
