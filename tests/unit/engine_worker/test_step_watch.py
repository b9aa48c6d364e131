"""Which steps have hung: those that outlast all others by far, and none of a process that stood."""

from __future__ import annotations

import pytest

from pagemesh.engine.worker.watch import LEAST_US, LONGEST_TIMES, StepWatch

SECOND_US = 1_000_000
MOST_US = 300 * SECOND_US


def looks_until_hung(
    watch: StepWatch, *, longest_us: int, period_us: int, looks_max: int, now_us: int = 0
) -> int | None:
    """How many looks ``period_us`` apart it takes at a step that never ends."""
    for look in range(looks_max):
        if watch.is_hung(7, computing=True, longest_us=longest_us, now_us=now_us):
            return look
        now_us += period_us
    return None


@pytest.mark.parametrize(
    ("longest_us", "limit_us"),
    [
        (0, MOST_US),
        (1, LEAST_US),
        (2 * SECOND_US, LONGEST_TIMES * 2 * SECOND_US),
        (60 * SECOND_US, MOST_US),
    ],
    ids=["the first may compile kernels", "after short ones", "after long ones", "after a minute"],
)
def test_a_step_may_take_long_but_not_for_ever(longest_us: int, limit_us: int) -> None:
    looks = limit_us // (SECOND_US // 2)
    found = looks_until_hung(
        StepWatch(MOST_US), longest_us=longest_us, period_us=SECOND_US // 2, looks_max=looks + 10
    )
    assert found == looks + 1


def test_steps_that_follow_each_other_are_not_one_long_step() -> None:
    watch = StepWatch(MOST_US)
    for second in range(10 * LEAST_US // SECOND_US):
        began = second // 50
        now_us = second * SECOND_US
        assert not watch.is_hung(began, computing=True, longest_us=1, now_us=now_us)


def test_time_without_a_step_does_not_count() -> None:
    watch = StepWatch(MOST_US)
    for second in range(10 * LEAST_US // SECOND_US):
        computing = second % 50 > 0
        assert not watch.is_hung(1, computing=computing, longest_us=1, now_us=second * SECOND_US)


def test_a_process_that_stood_still_has_not_hung() -> None:
    watch = StepWatch(MOST_US)
    assert not watch.is_hung(1, computing=True, longest_us=1, now_us=0)
    assert not watch.is_hung(1, computing=True, longest_us=1, now_us=100 * LEAST_US)
