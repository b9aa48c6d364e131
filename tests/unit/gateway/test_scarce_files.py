"""That connections will be reset for want of open files is said now and then."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from pagemesh.gateway.doors import scarce_files
from pagemesh.gateway.doors.scarce_files import SAID_PERIOD_S, ScarceFiles


def test_scarce_files_are_told_of_once_a_minute_for_as_long_as_they_are_scarce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[tuple[int, int] | None] = [None]
    monkeypatch.setattr(scarce_files, "few_open_files_left", lambda _known: left[0])
    files = ScarceFiles()
    with capture_logs() as logs:
        files.look(5, 0.0)
        assert not logs
        left[0] = (20, 26)
        for second in range(int(2.5 * SAID_PERIOD_S)):
            files.look(6, float(second))
        left[0] = None
        files.look(5, 10 * SAID_PERIOD_S)
    assert [log["event"] for log in logs] == ["gateway.open_files_scarce"] * 3
    assert {(log["open"], log["limit"], log["connections"]) for log in logs} == {(20, 26, 6)}
