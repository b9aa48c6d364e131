"""Names, ids and time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemesh.runtime import ids
from pagemesh.runtime.clock import ManualClock, MonotonicClock, came_us, wall_ns

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@given(st.text(max_size=200))
def test_any_text_becomes_one_subject_token(text: str) -> None:
    assert NAME.fullmatch(ids.to_name(text, fallback="fallback"))


def test_a_name_that_is_one_stays_as_it_is() -> None:
    assert ids.to_name("node-7_a", fallback="x") == "node-7_a"
    assert ids.to_name("gpu.cluster.local", fallback="x") == "gpu-cluster-local"
    assert ids.to_name("...", fallback="x") == "x"
    assert NAME.fullmatch(ids.host_name())
    assert NAME.fullmatch(ids.new_service_name("decode"))


def test_ids_do_not_repeat_and_fit_their_fields() -> None:
    incarnations = {ids.new_incarnation() for _ in range(1_000)}
    assert len(incarnations) == 1_000
    assert all(0 < value < 2**64 for value in incarnations)
    requests = {ids.new_request_id() for _ in range(1_000)}
    assert len(requests) == 1_000
    assert all(re.fullmatch(r"[0-9a-f]{32}", value) for value in requests)


def test_a_manual_clock_moves_when_told_to_and_only_forward() -> None:
    clock = ManualClock(5)
    clock.advance_ms(7)
    assert (clock.now_ms(), clock.now_us()) == (12, 12_000)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance_ms(-1)


def test_who_came_first_is_told_for_hosts_that_were_started_at_different_times() -> None:
    old, new = ManualClock(30 * 86_400_000), ManualClock(60_000, booted_us=29 * 86_400_000_000)
    old_us, new_us = old.now_us(), new.now_us()
    for clock in (old, new):
        clock.advance_ms(5)
    assert came_us(old, old_us) - came_us(new, new_us) == 86_400_000_000 - 60_000_000
    assert abs(came_us(MonotonicClock(), MonotonicClock().now_us()) - 1e6 * time.time()) < 2e6


def test_wall_time_of_now_is_now() -> None:
    clock = MonotonicClock()
    assert abs(wall_ns(clock.now_us()) - time.time_ns()) < 2_000_000_000
    assert clock.now_us() // 1_000 <= clock.now_ms()


def test_when_somebody_came_does_not_change_however_late_it_is_asked_for() -> None:
    clock = ManualClock(60_000)
    then_us = clock.now_us()
    at_once_us = came_us(clock, then_us)
    clock.advance_ms(5_000)
    assert came_us(clock, then_us) == at_once_us


def test_a_clock_that_stands_before_1970_puts_requests_first_and_not_before_all_numbers() -> None:
    clock = ManualClock(60_000, booted_us=-86_400_000_000)
    assert came_us(clock, clock.now_us()) == 0
