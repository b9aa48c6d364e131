"""How long a worker can do without a tick."""

from __future__ import annotations

from tests.unit.engine_worker.bench import Bench, submit

from pagemesh.engine.worker import events as ev
from pagemesh.wire.pager_messages import Admit, Extend, Heartbeat, Queued


def test_a_worker_without_a_session_is_not_patient() -> None:
    bench = Bench()
    bench.tick()
    assert bench.core.patience_ms == bench.limits.tick_ms


def test_a_worker_with_nothing_to_do_waits_for_its_next_heartbeat() -> None:
    bench = Bench()
    bench.start()
    assert bench.core.patience_ms == bench.limits.idle_tick_ms
    bench.now = 900
    bench.handle(ev.GatewayLost("gw", 1))
    assert bench.core.patience_ms == 100
    bench.tick(100)
    assert "Heartbeat" in bench.open_kinds()
    assert bench.asked(Heartbeat).worker == "me"


def test_workers_of_a_host_beat_together_whenever_they_started() -> None:
    beats: list[float] = []
    for started_ms in (0.0, 640.0):
        bench = Bench()
        bench.now = started_ms
        bench.start()
        while "Heartbeat" not in bench.open_kinds():
            bench.tick(bench.core.patience_ms)
        beats.append(bench.now)
    assert beats == [1_000.0, 1_000.0]


def test_who_waits_for_pages_makes_it_impatient_and_who_draws_does_not() -> None:
    bench = Bench()
    bench.start()
    bench.ask(submit(max_tokens=9))
    assert bench.core.patience_ms == bench.limits.tick_ms
    bench.grant()
    assert bench.core.patience_ms == bench.limits.calm_tick_ms
    assert not [kind for kind in bench.open_kinds() if kind == Admit.__name__]


def test_who_waits_for_pages_to_go_on_with_makes_it_impatient_too() -> None:
    bench = Bench()
    bench.start()
    bench.ask(submit(max_tokens=40))
    bench.grant(pages=3)
    for token in range(50, 53):
        bench.step(token)
    extend = bench.asked(Extend)
    assert bench.core.patience_ms == bench.limits.calm_tick_ms
    bench.answer(Extend, Queued(key=extend.key, ahead_count=0, ask_again_ms=500))
    assert bench.core.patience_ms == bench.limits.tick_ms
