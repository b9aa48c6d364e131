"""A second living pager of a host gives way; one that replaces a dead one begins at once."""

from __future__ import annotations

import asyncio
import time

import pytest

from pagemesh.pager.host_claim import HostClaim
from pagemesh.runtime import claim as claims
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.ids import new_service_name
from pagemesh.runtime.rpc import answer, send
from pagemesh.runtime.service import Stop
from pagemesh.wire import subjects
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.pager_reports import PagesSnapshot
from pagemesh.wire.presence import Announce, State

OURS = 5


class Other:
    """Another pager of ``host``: what of it is there can be chosen."""

    def __init__(self, bus: Bus, host: str, incarnation: int = 9, state: State = "ready") -> None:
        self._bus, self._host = bus, host
        self._words = Announce(
            role="pager", name="other", incarnation=incarnation, host=host, state=state
        )

    async def serve(self, *, answers: bool = True) -> None:
        listing = PagesSnapshot(host=self._host, epoch=0, sequence=0, first=0, keys=b"", more=False)

        def served(delivery: Delivery) -> None:
            if answers:
                answer(delivery, listing)

        await self._bus.subscribe(subjects.pager(self._host), served)

    async def announce(self) -> None:
        await self._bus.subscribe(subjects.ASK_PRESENCE, lambda _: self.say())

    def say(self) -> None:
        send(self._bus, subjects.PRESENCE, self._words)


@pytest.fixture
def host() -> str:
    return new_service_name("host")


@pytest.mark.parametrize("incarnation", [1, 9])
@pytest.mark.parametrize("answers", [True, False])
async def test_a_living_pager_of_the_host_is_named_with_the_remedy(
    bus: Bus, host: str, incarnation: int, answers: bool
) -> None:
    """One that is busy for a moment lives too."""
    other = Other(bus, host, incarnation)
    await other.serve(answers=answers)
    await other.announce()
    with pytest.raises(ConfigError, match=rf"^pager other serves host {host} at .*\(--host\)$"):
        await HostClaim(bus, host, OURS).make(Stop())


async def test_who_replaces_a_dead_pager_does_not_wait(bus: Bus, host: str) -> None:
    """Though another, which does not serve yet, begins too."""
    await Other(bus, host).announce()
    began = time.monotonic()
    await HostClaim(bus, host, OURS).make(Stop())
    assert time.monotonic() - began < 0.4


@pytest.mark.parametrize("state", ["draining", None])
async def test_who_is_frozen_or_about_to_end_is_replaced(
    bus: Bus, host: str, state: State | None
) -> None:
    other = Other(bus, host, state=state or "ready")
    await other.serve(answers=state is not None)
    if state is not None:
        await other.announce()
    await HostClaim(bus, host, OURS).make(Stop())


@pytest.mark.parametrize(("incarnation", "gives_way"), [(1, True), (9, False), (OURS, False)])
async def test_of_two_that_begin_together_the_one_of_the_higher_incarnation_gives_way(
    bus: Bus, host: str, monkeypatch: pytest.MonkeyPatch, incarnation: int, gives_way: bool
) -> None:
    monkeypatch.setattr(claims, "_KEEP_S", 5.0 if gives_way else 0.3)
    stop, claim = Stop(), HostClaim(bus, host, OURS)
    keeping = asyncio.create_task(claim.keep(stop))
    for name, number in ((host, incarnation), (new_service_name("elsewhere"), 1)):
        await asyncio.sleep(0.05)
        Other(bus, name, number).say()
    await keeping
    assert stop.requested == gives_way
    if gives_way:
        with pytest.raises(ConfigError, match=host):
            claim.check()
    else:
        claim.check()
