"""The restart policy of ``pagemesh up``."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagemesh.cli.mesh.restarts import GiveUp, Restart, RestartCore, RestartLimits

LIMITS = RestartLimits(exit_count_max=5, window_ms=10_000, pause_ms_first=100, pause_ms_max=300)


def test_a_first_death_is_answered_at_once() -> None:
    assert RestartCore(LIMITS).exited(0) == Restart(0)


def test_pauses_double_up_to_their_limit() -> None:
    core = RestartCore(LIMITS)
    decisions = [core.exited(now) for now in range(4)]
    assert decisions == [Restart(0), Restart(100), Restart(200), Restart(300)]


def test_a_child_that_dies_too_often_within_the_window_is_given_up() -> None:
    core = RestartCore(LIMITS)
    for now in range(4):
        core.exited(now * 1_000)
    assert core.exited(4_000) == GiveUp(exit_count=5, within_ms=4_000)


def test_deaths_outside_the_window_are_forgotten() -> None:
    core = RestartCore(LIMITS)
    for _ in range(4):
        core.exited(0)
    assert core.exited(10_000) == Restart(0)


@given(st.lists(st.integers(0, 5_000), max_size=60))
def test_whatever_the_deaths_pauses_and_memory_stay_bounded(gaps_ms: list[int]) -> None:
    core, now = RestartCore(LIMITS), 0
    for gap_ms in gaps_ms:
        now += gap_ms
        decision = core.exited(now)
        core.check()
        if isinstance(decision, Restart):
            assert 0 <= decision.after_ms <= LIMITS.pause_ms_max
        else:
            assert decision.within_ms < LIMITS.window_ms
