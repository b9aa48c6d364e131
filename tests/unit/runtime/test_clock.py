"""Times that outlive a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagemesh.runtime.clock import HostTime, MonotonicClock

ASK = "from pagemesh.runtime.clock import HostTime; print(HostTime().boot.hex())"


def test_what_is_kept_comes_back_as_it_was_and_no_later() -> None:
    now_ms = MonotonicClock().now_ms()
    host = HostTime()
    back_ms = [host.clock_ms(host.kept_ms(now_ms)) for _ in range(1_000)]
    assert max(back_ms) <= now_ms
    assert max(back_ms) >= now_ms - 5


def test_nobody_can_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostTime()
    before_ms = host.kept_ms(0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert abs(HostTime().kept_ms(0) - before_ms) < 1_000


@pytest.mark.parametrize("stopped_ms", [0, 60_000])
def test_who_is_stopped_while_it_looks_has_times_earlier_and_never_later(
    monkeypatch: pytest.MonkeyPatch, stopped_ms: int
) -> None:
    """Both clocks go on meanwhile: here by ``stopped_ms`` with each look at one of them."""
    now_ns = [10**12]

    def look(*_: int) -> int:
        now_ns[0] += stopped_ms * 1_000_000
        return now_ns[0]

    monkeypatch.setattr(time, "monotonic_ns", look)
    monkeypatch.setattr(time, "clock_gettime_ns", look)
    host = HostTime()
    assert host.kept_ms(0) == -stopped_ms
    assert host.clock_ms(0) == -stopped_ms


def test_processes_of_a_host_agree_on_its_start() -> None:
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == HostTime().boot.hex()
    assert len(HostTime().boot) == 16


def test_another_start_of_the_machine_is_told_from_other_clocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = HostTime()
    assert not HostTime().has_restarted(now.boot)
    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", lambda _: "time:[1]")
        other = HostTime()
    assert other.boot != now.boot and not other.has_restarted(now.boot)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_, **__: "another\n")
        after = HostTime()
    assert after.has_restarted(now.boot) and now.has_restarted(after.boot)


def test_where_nobody_knows_the_start_of_the_machine_it_may_be_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hidden(*_: object, **__: object) -> str:
        raise FileNotFoundError

    now = HostTime()
    monkeypatch.setattr(Path, "read_text", hidden)
    one, other = HostTime(), HostTime()
    assert one.boot != other.boot, "but not the same clock"
    assert not any(a.has_restarted(b.boot) for a in (now, one) for b in (one, other, now))
