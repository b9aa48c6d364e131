"""Who is waited for, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

from pagemesh.gateway.routing.returning import Returning
from pagemesh.runtime.directory import Changed, Joined, Lost
from pagemesh.wire.presence import Announce, State

WINDOW_MS = 30_000


def worker(state: State, incarnation: int = 1) -> Announce:
    return Announce(role="prefill", name="w", incarnation=incarnation, host="h", state=state)


@pytest.fixture
def returning() -> Iterator[Returning]:
    made = Returning(window_ms=WINDOW_MS)
    made.changed(Joined(worker("ready")), 0)
    yield made
    made.check()


def test_nobody_is_expected_while_all_are_there(returning: Returning) -> None:
    assert not returning.expected(1_000)


@pytest.mark.parametrize("reason", ["silent", "replaced"])
def test_who_vanished_is_expected_for_a_while(
    returning: Returning, reason: Literal["silent", "replaced"]
) -> None:
    returning.changed(Lost(worker("ready"), reason), 1_000)
    assert returning.expected(WINDOW_MS)
    assert not returning.expected(1_000 + WINDOW_MS)


def test_who_said_good_bye_is_not_expected(returning: Returning) -> None:
    returning.vanished("w", 900)  # nobody listens there, just before it leaves
    returning.changed(Lost(worker("leaving"), "left"), 1_000)
    assert not returning.expected(1_001)


def test_who_starts_is_expected_for_as_long_as_it_takes(returning: Returning) -> None:
    returning.changed(Lost(worker("ready"), "replaced"), 1_000)
    returning.changed(Joined(worker("starting", 2)), 1_000)
    assert returning.expected(10 * WINDOW_MS)
    returning.changed(Changed(worker("ready", 2)), 10 * WINDOW_MS)
    assert not returning.expected(10 * WINDOW_MS)


def test_who_turns_out_to_serve_another_model_is_not_expected(returning: Returning) -> None:
    returning.changed(Lost(worker("ready"), "silent"), 1_000)
    returning.of_others("w")
    assert not returning.expected(1_001)
    returning.changed(Joined(worker("starting", 2)), 1_002)
    returning.of_others("w")
    assert not returning.expected(1_003)


def test_finding_nobody_again_and_again_prolongs_nothing(returning: Returning) -> None:
    for now_ms in range(0, WINDOW_MS, 1_000):
        returning.vanished("w", now_ms)
    assert not returning.expected(WINDOW_MS)


def test_who_is_found_silent_while_it_starts_counts_as_starting_alone(returning: Returning) -> None:
    returning.changed(Changed(worker("starting")), 1_000)
    returning.vanished("w", 1_001)  # found by what was sent before
    assert returning.expected(1_002)
