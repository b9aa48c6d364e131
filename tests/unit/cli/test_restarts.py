"""The restart policy of ``pagemesh up``."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagemesh.cli.mesh.restarts import GiveUp, Restart, RestartCore, RestartLimits

LIMITS = RestartLimits(exit_count_max=5, life_ms_min=10_000, pause_ms_first=100, pause_ms_max=300)


def test_a_first_death_is_answered_at_once() -> None:
    assert RestartCore(LIMITS).exited(0, 1) == Restart(0)


def test_pauses_double_up_to_their_limit() -> None:
    core = RestartCore(LIMITS)
    decisions = [core.exited(now, now + 1) for now in range(4)]
    assert decisions == [Restart(0), Restart(100), Restart(200), Restart(300)]


def test_a_child_that_keeps_dying_is_given_up_however_long_it_takes_to_start() -> None:
    core = RestartCore(LIMITS)
    for now in range(4):
        core.exited(now * 9_500, now * 9_500 + 9_000)
    assert core.exited(38_000, 47_000) == GiveUp(exit_count=5, within_ms=38_000)


def test_a_life_that_was_long_makes_up_for_the_deaths_before_it() -> None:
    core = RestartCore(LIMITS)
    for _ in range(4):
        core.exited(0, 0)
    assert core.exited(0, 10_000) == Restart(0)
    assert core.exited(10_000, 10_001) == Restart(100)


def test_who_is_given_up_has_died_so_often_since_its_last_long_life() -> None:
    core = RestartCore(LIMITS)
    core.exited(0, 5)
    core.exited(5, 100_000)
    for now in range(100_001, 100_004):
        core.exited(now, now)
    assert core.exited(100_004, 100_004) == GiveUp(exit_count=5, within_ms=4)


@given(st.lists(st.integers(0, 15_000), max_size=60))
def test_whatever_the_deaths_pauses_and_memory_stay_bounded(lives_ms: list[int]) -> None:
    core, now = RestartCore(LIMITS), 0
    for life_ms in lives_ms:
        decision = core.exited(now, now + life_ms)
        now += life_ms
        core.check()
        if isinstance(decision, GiveUp):
            assert decision.within_ms < LIMITS.exit_count_max * LIMITS.life_ms_min
            return
        assert 0 <= decision.after_ms <= LIMITS.pause_ms_max
