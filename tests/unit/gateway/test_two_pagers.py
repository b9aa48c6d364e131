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
from pagemesh.runtime.directory import Changed, Directory


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


def test_a_pager_is_told_of_again_when_another_of_its_host_is_gone() -> None:
    directory = Directory()
    watch = TwoPagers(directory)
    one, other, far = (
        structs.replace(pager(host), name=name, incarnation=number)
        for number, (host, name) in enumerate([("h", "one"), ("h", "other"), ("far", "f")], 1)
    )
    for each in (one, other, far):
        directory.hear(each, 0)
    (lost,) = directory.hear(structs.replace(other, state="leaving"), 10)
    watch.lost(lost.announce)
    assert directory.hear(one, 20) == [Changed(one)]
    assert directory.hear(far, 20) == []
