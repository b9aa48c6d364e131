"""What a gateway hears of a pager's cache: events, and a listing when some of them were missed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from tests.unit.gateway.routes import FACTS, KEYS, PAGE, SALT, SECRET, pager, stored, want, worker
from tests.unit.gateway.support import eventually

from pagemesh.gateway.actor import GatewayActor
from pagemesh.gateway.calls.events import Route
from pagemesh.runtime import rpc
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.directory import Changed, Joined
from pagemesh.runtime.ids import new_incarnation
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import Busy, Fault
from pagemesh.wire.pager_reports import PagesSnapshot, SnapshotWanted

PART_KEYS = 8
PARTS = [0, 8, 16]
"""Where those of all ``KEYS`` begin."""


@dataclass
class FakePager:
    """Lists the first ``key_count`` of ``KEYS`` in parts, as of its event ``sequence``."""

    host: str
    key_count: int = 0
    sequence: int = 0
    refusal: Fault | None = None
    asked: list[int] = field(default_factory=list)
    """Where the parts begin that were asked for."""

    def admit(self, delivery: Delivery) -> None:
        first = codec.decode_as(delivery.data, SnapshotWanted).first
        self.asked.append(first)
        if self.refusal is not None:
            raise self.refusal
        end = min(first + PART_KEYS, self.key_count)
        keys = KEYS[first:end].astype("<u8").tobytes()
        rpc.answer(delivery, PagesSnapshot(
            host=self.host, epoch=1, sequence=self.sequence, first=first, keys=keys,
            more=end < self.key_count,
        ))  # fmt: skip


@pytest.fixture
async def lister(bus: Bus) -> FakePager:
    made = FakePager(f"host-{new_incarnation():x}")
    await bus.subscribe(subjects.pager(made.host), made.admit)
    return made


@pytest.fixture
async def gateway(shared_nats_server: NatsServer, lister: FakePager) -> AsyncIterator[GatewayActor]:
    """One that knows a worker of the pager's host, and not yet the pager."""
    name = f"g-{lister.host}"
    connect = BusConfig(url=shared_nats_server.url)
    async with Bus.connect(connect, role="gateway", name=name) as own:
        actor = GatewayActor(
            own, name=name, incarnation=1, host=lister.host, model=FACTS.model, secret=SECRET,
            request_count_max=1,
        )  # fmt: skip
        async with actor.running() as made:
            made.presence_changed(Joined(worker("d", "decode", host=lister.host)))
            yield made
            made.router.check()


def predicted_pages(gateway: GatewayActor) -> int:
    """Of the prompt that ``KEYS`` are of."""
    route = gateway.router.choose(FACTS.model, SALT, want())
    assert isinstance(route, Route)
    return -(-route.predicted_tokens // PAGE)


async def test_what_a_pager_says_that_it_stored_is_counted_on(
    gateway: GatewayActor, lister: FakePager, bus: Bus
) -> None:
    gateway.presence_changed(Joined(pager(lister.host)))
    await eventually(lambda: lister.asked == [0])
    rpc.send(bus, subjects.pages(lister.host), stored(lister.host, 1, 10))
    await eventually(lambda: predicted_pages(gateway) == 10)
    assert lister.asked == [0], "nothing was missed"


async def test_a_pager_that_is_new_here_is_asked_for_all_it_has_part_by_part(
    gateway: GatewayActor, lister: FakePager
) -> None:
    lister.key_count = len(KEYS)
    gateway.presence_changed(Joined(pager(lister.host)))
    await eventually(lambda: predicted_pages(gateway) == len(KEYS))
    assert lister.asked == PARTS


async def test_an_event_that_was_missed_has_all_asked_for_again(
    gateway: GatewayActor, lister: FakePager, bus: Bus
) -> None:
    gateway.presence_changed(Joined(pager(lister.host)))
    await eventually(lambda: lister.asked == [0])
    for sequence, asked_times in ((3, 1), (5, 2)):
        lister.key_count, lister.sequence = len(KEYS), sequence
        rpc.send(bus, subjects.pages(lister.host), stored(lister.host, sequence, 1))
        await eventually(lambda times=asked_times: lister.asked == [0] + PARTS * times)  # type: ignore[misc]
    assert predicted_pages(gateway) == len(KEYS)


async def test_a_listing_that_failed_is_asked_for_again_at_the_next_announcement(
    gateway: GatewayActor, lister: FakePager
) -> None:
    lister.key_count, lister.refusal = len(KEYS), Busy("later")
    gateway.presence_changed(Joined(pager(lister.host)))
    await eventually(lambda: lister.asked == [0] and not gateway._snapshots)
    lister.refusal = None
    gateway.presence_changed(Changed(pager(lister.host)))
    await eventually(lambda: predicted_pages(gateway) == len(KEYS))
    assert lister.asked == [0, *PARTS]


async def test_while_a_listing_comes_in_no_second_one_is_asked_for(
    gateway: GatewayActor, lister: FakePager
) -> None:
    lister.key_count = len(KEYS)
    for sequence in range(3):
        gateway.presence_changed(Changed(pager(lister.host, sequence=sequence)))
    await eventually(lambda: not gateway._snapshots)
    assert lister.asked == PARTS
