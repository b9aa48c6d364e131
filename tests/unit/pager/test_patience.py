"""How long a pager can do without a tick."""

from __future__ import annotations

from tests.unit.pager.rig import ROOT, Rig, Worker, fill_of
from tests.unit.pager.steps import cache, invalidated

from pagemesh.pager.leases.patience import IDLE_TICK_MS, TICK_MS, Absence, patience_ms
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.pager_messages import Queued


def test_a_pager_whose_sequences_have_their_pages_is_patient() -> None:
    rig = Rig()
    worker = Worker(rig, "a", 1)
    worker.granted(1, range(8))
    assert patience_ms(rig.core.books) == IDLE_TICK_MS


def test_who_waits_for_pages_makes_it_impatient_until_they_come() -> None:
    rig = Rig(4)
    worker = Worker(rig, "a", 1)
    lease = worker.granted(1, range(16))
    assert isinstance(worker.admit(2, range(20, 30)), Queued)
    assert patience_ms(rig.core.books) == TICK_MS
    worker.release(lease, cache=False)
    assert patience_ms(rig.core.books) == IDLE_TICK_MS


def test_an_open_ticket_makes_it_impatient_since_it_may_end() -> None:
    rig = Rig()
    worker = Worker(rig, "a", 1)
    worker.offered(worker.granted(1, range(8)), fill_of(range(8)))
    assert patience_ms(rig.core.books) == TICK_MS
    worker.cancel()
    assert patience_ms(rig.core.books) == IDLE_TICK_MS


def test_a_session_that_is_about_to_end_gets_its_tick_in_time() -> None:
    rig = Rig()
    Worker(rig, "a", 1).granted(1, range(8))
    ttl_ms = rig.limits.session_ttl_ms
    rig.tick(ttl_ms - 120)
    assert patience_ms(rig.core.books) == 120
    rig.tick(120)
    assert patience_ms(rig.core.books) == TICK_MS  # its pages drain until it is proven dead


def test_what_has_a_time_to_live_makes_it_impatient_only_when_that_is_about_to_end() -> None:
    rig = Rig()
    worker = Worker(rig, "a", 1)
    cache(worker, 1, range(8), terms=CacheTerms(ttl_s=30 * 86_400))
    assert patience_ms(rig.core.books) == IDLE_TICK_MS
    cache(worker, 2, range(20, 28), terms=CacheTerms(ttl_s=2))
    seen = []
    for _ in range(8):
        seen.append((patience_ms(rig.core.books), rig.core.books.pool.idle))
        worker.heartbeat()
        rig.tick(IDLE_TICK_MS)
    assert seen == [*5 * [(IDLE_TICK_MS, 4)], (TICK_MS, 4), *2 * [(IDLE_TICK_MS, 2)]]


def test_who_uses_what_was_invalidated_does_not_make_it_impatient() -> None:
    rig = Rig()
    worker = Worker(rig, "a", 1)
    lease = worker.granted(1, range(8))
    assert invalidated(rig, "root", ROOT.hex()).goes_on is False
    assert patience_ms(rig.core.books) == IDLE_TICK_MS
    worker.release(lease)
    assert not rig.core.books.forest.retired


def test_a_tick_that_comes_far_too_late_says_for_how_long_the_pager_was_away() -> None:
    absence = Absence(unnoticed_ms=2_300)
    times_ms = (90_000, 90_050, 90_550, 92_000)
    assert [absence.at_tick(now_ms, on_bus=True) for now_ms in times_ms] == [0] * 4
    assert absence.at_tick(102_000, on_bus=True) == 10_000 - IDLE_TICK_MS
    assert absence.at_tick(102_050, on_bus=True) == 0


def test_ticks_without_the_bus_say_how_long_nobody_could_be_heard() -> None:
    absence = Absence(unnoticed_ms=2_300)
    assert absence.at_tick(90_000, on_bus=False) == 0
    assert absence.at_tick(90_050, on_bus=True) == 0
    assert absence.at_tick(90_100, on_bus=False) == 50 + 2_300
    assert absence.at_tick(90_600, on_bus=False) == 500
    assert absence.at_tick(90_700, on_bus=True) == 0
