"""The pager's actor while the bus is away: it hears nobody, and nobody hears it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from tests.unit.pager.rig import LAYOUT

from pagemesh.pager.actor import PagerActor
from pagemesh.pager.board import PagerBoard, PagerSettings
from pagemesh.pager.due import TickDue
from pagemesh.pager.leases.patience import IDLE_TICK_MS
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.runtime.bus import Bus, BusState, Delivery
from pagemesh.runtime.clock import ManualClock
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import Busy, Disconnected, Fault
from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import OpenSession, PoolSpec

HOST = "host"
SPEC = PoolSpec(layout_digest=LAYOUT, page_size=4, page_bytes=1 << 12)
LIMITS = PagerLimits()
AWAY_MS = 10 * LIMITS.session_ttl_ms


class Line:
    """A bus that is there or not; with ``fault`` it takes nothing."""

    config = BusConfig()

    def __init__(self) -> None:
        self.state = BusState.CONNECTED
        self.fault: Fault | None = None

    def publish(self, *_: Any, **__: Any) -> None:
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def actor(
    tmp_path: Path, line: Line, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PagerActor]:
    """One with a worker that was heard of just now."""
    settings = PagerSettings(
        HOST, "pager", 1, tmp_path, 64 * SPEC.page_bytes, b"secret", LIMITS, False, "lru"
    )
    made = PagerActor(
        settings, cast(Bus, line), clock, PagerBoard(settings),
        lambda _due: True, PoolMemory(tmp_path),
    )  # fmt: skip
    monkeypatch.setattr(made._holders, "is_locked", lambda _name: True)
    monkeypatch.setattr(made._holders, "is_dead", lambda _incarnation: False)
    message = OpenSession(
        worker="worker", incarnation=1, role="decode", lock_name="lock", pool=SPEC
    )
    await made.handle(
        Delivery(cast(Bus, line), subjects.pager(HOST), "answers", codec.encode(message), {})
    )
    yield made
    await made.end()


async def silence(actor: PagerActor, clock: ManualClock, for_ms: int) -> None:
    """Nobody says anything."""
    for _ in range(for_ms // IDLE_TICK_MS):
        clock.advance_ms(IDLE_TICK_MS)
        await actor.handle(TickDue())


def is_known(actor: PagerActor) -> bool:
    assert actor._life is not None
    return 1 in actor._life.core.books.sessions


async def test_a_bus_that_is_away_ends_no_session(
    actor: PagerActor, line: Line, clock: ManualClock
) -> None:
    """It is noticed late, and workers find it again later than the pager."""
    await silence(actor, clock, line.config.unnoticed_ms // IDLE_TICK_MS * IDLE_TICK_MS)
    line.state = BusState.RECONNECTING
    await silence(actor, clock, AWAY_MS)
    line.state = BusState.CONNECTED
    await silence(actor, clock, LIMITS.session_ttl_ms - 2 * IDLE_TICK_MS)
    assert is_known(actor)
    await silence(actor, clock, 3 * IDLE_TICK_MS)
    assert not is_known(actor)


async def test_what_could_not_be_sent_without_the_bus_is_no_news_of_the_pager(
    actor: PagerActor, line: Line
) -> None:
    """A line a lease, twice a second, said what the bus had said once."""
    for fault, count in ((Disconnected("away"), 0), (Busy("too much waits to be sent"), 1)):
        line.fault = fault
        with capture_logs() as logs:
            actor._say(subjects.worker("worker"), Ok())
        assert len(logs) == count
