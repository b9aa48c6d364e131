"""Sequences that lose their pages are told in the log with what helps, and not each of hundreds."""

from __future__ import annotations

from typing import Any

import pytest

from pagemesh.engine.worker import preemptions
from pagemesh.engine.worker.events import Preempted
from pagemesh.engine.worker.preemptions import PERIOD_US, Preemptions
from pagemesh.wire.messages import SequenceKey


def lost(reason: str = "preempted") -> Preempted:
    return Preempted(SequenceKey(request="a" * 32, attempt=1, choice=0), 5, reason, "all is used")


def test_of_many_alike_one_is_told_with_how_many_there_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[str, int]] = []

    class Log:
        def warning(self, _event: str, *, reason: str, untold: int, **_: Any) -> None:
            said.append((reason, untold))

    monkeypatch.setattr(preemptions, "_log", Log())
    told = Preemptions()
    for at_us in (0, 1, PERIOD_US - 1):
        told.heard(lost(), at_us)
    told.heard(lost("revoked"), 2)
    assert said == [("preempted", 0), ("revoked", 0)], "each reason has a remedy of its own"
    told.heard(lost(), PERIOD_US)
    told.heard(lost(), 2 * PERIOD_US)
    assert said[2:] == [("preempted", 2), ("preempted", 0)]
