"""Two pagers of a host are told of while both live, and a restarted one is no second."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs
from structlog.testing import capture_logs
from tests.unit.gateway.routes import pager
from tests.unit.gateway.support import eventually

from pagemesh.gateway import two_pagers
from pagemesh.gateway.two_pagers import TwoPagers
from pagemesh.runtime.directory import Directory


@pytest.mark.parametrize(("lives", "closes"), [(True, False), (False, False), (True, True)])
async def test_a_second_pager_is_told_of_if_the_first_lives_on(
    monkeypatch: pytest.MonkeyPatch, lives: bool, closes: bool
) -> None:
    monkeypatch.setattr(two_pagers, "_SURE_S", 0.01)
    directory = Directory()
    watch = TwoPagers(directory)
    with capture_logs() as logs:
        for number, name in enumerate(("one", "other")):
            came = structs.replace(pager("h"), name=name, incarnation=1 + number)
            directory.hear(came, 1_000 * number)
            watch.joined(came)
        if closes:
            watch.close()
            await asyncio.sleep(0.05)
        elif not lives:
            directory.expire(3_000)
            assert len(directory.of_role("pager")) == 1
            await asyncio.sleep(0.05)
        else:
            await eventually(lambda: bool(logs))
    told = [(line["event"], line["host"], line["pagers"]) for line in logs]
    assert told == ([("gateway.two_pagers", "h", ["one", "other"])] if lives and not closes else [])
