"""Silence that is too long is told from silence that nobody could have broken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagemesh.cli.mesh.watch import WatchCore, WatchLimits

LIMITS = WatchLimits(silence_ms_max=5_000, first_ms_max=60_000, look_ms=500)
HOUR_MS = 3_600_000


class Watched:
    """A core with a clock of its own, looked at as often as it wants."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.core = WatchCore(LIMITS, self.now_ms)

    def silent_for(self, duration_ms: int) -> bool:
        """Whether it was found frozen at any look."""
        found = False
        for _ in range(duration_ms // LIMITS.look_ms):
            self.now_ms += LIMITS.look_ms
            found = self.core.look(self.now_ms) or found
        return found


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.core.check()


def test_a_child_that_beats_is_never_frozen(watched: Watched) -> None:
    for _ in range(100):
        watched.core.beat()
        assert not watched.silent_for(4_500)


def test_silence_beyond_the_limit_is_a_freeze(watched: Watched) -> None:
    watched.core.beat()
    assert not watched.silent_for(5_000)
    assert watched.silent_for(500)


def test_a_child_may_take_long_to_its_first_beat(watched: Watched) -> None:
    assert not watched.silent_for(60_000)
    assert watched.silent_for(500)


def test_an_hour_in_which_nobody_looked_is_held_against_nobody(watched: Watched) -> None:
    """The machine slept, or we were stopped: the children could not beat either."""
    watched.core.beat()
    watched.silent_for(1_000)
    watched.now_ms += HOUR_MS
    assert not watched.core.look(watched.now_ms)
    assert not watched.silent_for(2_500)


def test_a_watcher_that_is_always_late_still_finds_a_freeze(watched: Watched) -> None:
    watched.core.beat()
    late = []
    for _ in range(6):
        watched.now_ms += 60_000
        late.append(watched.core.look(watched.now_ms))
    assert late == [False] * 5 + [True]


def test_the_first_beat_may_take_no_less_than_any_other() -> None:
    core = WatchCore(WatchLimits(silence_ms_max=5_000, first_ms_max=1_000, look_ms=500), 0)
    assert [core.look(now_ms) for now_ms in range(500, 6_000, 500)] == 10 * [False] + [True]
