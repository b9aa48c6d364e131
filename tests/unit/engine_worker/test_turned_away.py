"""Why a worker has no session is said once, when somebody has to do something about it."""

from __future__ import annotations

from typing import Any

import pytest

from pagemesh.engine.worker import turned_away
from pagemesh.engine.worker.turned_away import SILENT_US, TurnedAway
from pagemesh.wire.messages import Ok, Refused

ABSENT = Refused(code="Absent", message="nobody listens")
OTHER = Refused(code="Stale", message="pages of the pool are others")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    class Log:
        def warning(self, event: str, *, why: str, **_: Any) -> None:
            found.append(why)

    monkeypatch.setattr(turned_away, "_log", Log())
    return found


def test_another_pool_is_told_at_once_and_once(said: list[str]) -> None:
    turned = TurnedAway("h")
    for at_us in range(3):
        turned.heard(OTHER, at_us)
    assert said == ["pages of the pool are others"]


def test_a_pager_that_is_not_there_is_told_after_a_while_and_after_the_next_loss(
    said: list[str],
) -> None:
    turned = TurnedAway("h")
    for at_us in (5, SILENT_US, SILENT_US + 4):
        turned.heard(ABSENT, at_us)
    assert said == []
    for at_us in (SILENT_US + 5, SILENT_US + 6):
        turned.heard(ABSENT, at_us)
    assert said == ["no pager of host h answers (nobody listens)"]
    turned.heard(Ok(), SILENT_US + 7)
    turned.heard(ABSENT, SILENT_US + 8)
    assert len(said) == 1, "it has just gone"
    turned.heard(ABSENT, 2 * SILENT_US + 8)
    assert len(said) == 2


def test_a_pager_that_has_no_room_for_another_session_is_no_silent_one(said: list[str]) -> None:
    turned = TurnedAway("h")
    for at_us in (0, SILENT_US):
        turned.heard(Refused(code="Busy", message="64 sessions are known"), at_us)
    assert said == ["64 sessions are known"]
