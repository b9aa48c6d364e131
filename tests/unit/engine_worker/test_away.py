"""A pager that is gone and does not come back: nobody waits for it in silence."""

from __future__ import annotations

from tests.unit.engine_worker.bench import Bench, submit

from pagemesh.engine.worker import events as ev
from pagemesh.engine.worker.settings import WorkerLimits

LIMITS = WorkerLimits()


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


def test_who_has_pages_goes_on_without_a_pager() -> None:
    bench = Bench().start()
    bench.ask(submit(10))
    bench.grant()
    bench.handle(ev.PagerLost())
    wait(bench, LIMITS.pager_wait_ms_max + 1_000)
    assert not any(frame.error for frame in bench.frames)
    assert "Admit" not in bench.open_kinds()
