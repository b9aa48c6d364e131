"""What a gateway hears, and whom it tells; what it says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs
from structlog.testing import capture_logs
from tests.unit.gateway.routes import SECRET, pager, worker
from tests.unit.gateway.support import DECODE, REQUEST, eventually, frame

from pagemesh.gateway import measures
from pagemesh.gateway.actor import GatewayActor
from pagemesh.gateway.api.api_errors import from_fault
from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.events import Route
from pagemesh.gateway.calls.spec import RequestLimits
from pagemesh.gateway.life import Life
from pagemesh.gateway.routing.returning import Returning
from pagemesh.runtime.bus import Bus, BusState
from pagemesh.runtime.directory import Change, Changed, Joined, Lost
from pagemesh.wire.errors import Busy, Malformed, NotReady, NotServed
from pagemesh.wire.identity import secret_tag
from pagemesh.wire.messages import Ok
from pagemesh.wire.work_messages import Finish, Frames


class Told:
    """A life that takes note of what it is fed."""

    def __init__(self) -> None:
        self.core = SimpleNamespace(spec=SimpleNamespace(request=REQUEST))
        self.events: list[ev.Event] = []

    def feed(self, event: ev.Event) -> None:
        self.events.append(event)


class Gateway(GatewayActor):
    """One that is connected to nobody: what it would do besides is named in ``spawned``."""

    def __init__(self) -> None:
        self.link = SimpleNamespace(
            state=BusState.CONNECTED, on_state=lambda _: None, message_bytes_max=1 << 20
        )
        super().__init__(
            cast(Bus, self.link), name="g", incarnation=1, host="a", model="tiny", secret=SECRET,
            request_count_max=1,
        )  # fmt: skip
        self.spawned: list[str] = []
        self.told = Told()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        work.close()
        self.spawned.append(name)

    def begin_one(self) -> None:
        self.begin(cast(Life, self.told))

    def hear(self, counter: int, finish: Finish | None = None) -> None:
        """A message of one frame."""
        self.received(Frames(
            worker=DECODE.name, incarnation=DECODE.incarnation, gateway_incarnation=1,
            counter=counter, frames=[frame(0, [1], finish=finish)],
        ))  # fmt: skip


@pytest.fixture
async def gateway() -> Gateway:
    return Gateway()


async def test_a_frame_goes_to_the_request_that_it_is_of(gateway: Gateway) -> None:
    gateway.begin_one()
    gateway.hear(1)
    assert gateway.told.events == [ev.Begin(), ev.FrameArrived(DECODE, frame(0, [1]))]
    assert gateway.spawned == []


async def test_requests_are_told_which_worker_had_a_message_lost(gateway: Gateway) -> None:
    gateway.begin_one()
    for counter in (1, 2, 4, 5):
        gateway.hear(counter)
    missed = [one for one in gateway.told.events if isinstance(one, ev.FramesMissed)]
    assert missed == [ev.FramesMissed(DECODE)]
    assert gateway.told.events.index(missed[0]) == 3, "before the frames that came after it"


async def test_frames_that_crossed_the_end_of_their_request_have_nobody_told(
    gateway: Gateway,
) -> None:
    gateway.begin_one()
    gateway._forget(REQUEST)
    gateway.hear(1)
    assert gateway.spawned == []
    later_ms = gateway.clock.now_ms() + 1_000
    gateway.clock = cast(Any, SimpleNamespace(now_ms=lambda: later_ms))
    gateway.hear(2, finish="stop")
    assert gateway.spawned == []
    gateway.hear(3)
    assert gateway.spawned == ["disown"]


async def test_what_is_no_message_for_a_gateway_is_refused(gateway: Gateway) -> None:
    with pytest.raises(Malformed):
        gateway.received(Ok())


async def test_a_change_that_finds_the_inbox_full_is_told_later(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted: list[Any] = []
    refusals = [Busy("full")] * 2

    def admit(change: Change) -> None:
        if refusals:
            raise refusals.pop()
        admitted.append(change)

    monkeypatch.setattr("pagemesh.gateway.actor._CHANGE_RETRY_S", 0.01)
    monkeypatch.setattr(gateway._inbox, "admit", admit)
    change = Joined(worker("d", "decode"))
    gateway._admit_change(change)
    assert admitted == []
    await eventually(lambda: admitted == [change])


async def test_why_it_is_not_ready_is_told_by_what_has_to_be_mended_first(gateway: Gateway) -> None:
    assert gateway.unready_why == "the gateway is starting"
    gateway.announce("ready")
    assert gateway.unready_why == "no worker is ready"
    gateway.presence_changed(Joined(worker("d", "decode")))
    assert gateway.unready_why == ""
    gateway.link.state = BusState.RECONNECTING
    assert gateway.unready_why == "the bus is away"


async def test_a_gateway_of_another_model_than_its_workers_says_so(gateway: Gateway) -> None:
    gateway.announce("ready")
    other = worker("d", "decode")
    assert other.model is not None
    gateway.presence_changed(
        Joined(structs.replace(other, model=structs.replace(other.model, model="large")))
    )
    assert gateway.unready_why.endswith("only other models are served")
    assert "tiny" not in gateway.unready_why, "health checks need no key"
    with pytest.raises(NotServed) as caught:
        await gateway.facts(RequestLimits(worker_wait_ms_max=1))
    error = from_fault(caught.value)
    assert (error.status, error.code) == (503, "not_ready")
    assert "give the gateway the --model and --model-name of its workers" in error.message


async def test_a_model_that_starts_or_was_served_is_waited_for_beside_those_of_others(
    gateway: Gateway,
) -> None:
    gateway.announce("ready")
    ours = worker("d", "decode")
    assert ours.model is not None
    others = structs.replace(ours, name="o", model=structs.replace(ours.model, model="large"))
    for change in (
        Joined(others),
        Joined(structs.replace(ours, state="starting")),
        Changed(ours),
        Lost(ours, "left"),
    ):
        gateway.presence_changed(change)
        _ = gateway.known_facts  # as requests look at them
        told = gateway.unready_why
        if change.announce is others:
            assert told.endswith("only other models are served")
        else:
            assert told == ("" if isinstance(change, Changed) else "no worker is ready")


async def test_a_pager_of_another_secret_is_told_of_when_it_comes(gateway: Gateway) -> None:
    with capture_logs() as logs:
        for secret in (SECRET, b"another secret of sixteen bytes"):
            ours = structs.replace(pager("a"), secret_tag=secret_tag(secret))
            gateway.presence_changed(Joined(ours))
            gateway.presence_changed(Changed(ours))
    warned = [log for log in logs if log["log_level"] == "warning"]
    assert [(log["event"], log["host"]) for log in warned] == [("gateway.other_secret", "a")]
    assert "PAGEMESH_SECRET" in warned[0]["next"]


async def test_a_worker_is_expected_while_the_bus_is_away_and_when_it_has_just_gone(
    gateway: Gateway,
) -> None:
    announce = worker("d", "decode")
    gateway.presence_changed(Joined(announce))
    assert not gateway.surroundings.expected()
    gateway.link.state = BusState.RECONNECTING
    assert gateway.surroundings.expected(), "nobody can be seen"
    gateway.link.state = BusState.CONNECTED
    gateway.presence_changed(Lost(announce, "silent"))
    assert gateway.surroundings.expected()


async def test_there_is_room_for_as_many_requests_as_were_set(gateway: Gateway) -> None:
    assert gateway.room(1) and not gateway.room(2)
    gateway.begin_one()
    assert not gateway.room(1) and gateway.in_flight_count == 1
    with pytest.raises(Busy):
        gateway.begin_one()
    gateway._forget(REQUEST)
    assert gateway.room(1) and gateway.in_flight_count == 0


async def test_what_is_in_flight_is_measured_as_it_comes_and_goes(gateway: Gateway) -> None:
    for _ in range(2):
        gateway.begin_one()
        assert measures.in_flight._value.get() == 1
        gateway._forget(REQUEST)
        assert measures.in_flight._value.get() == 0


async def test_who_is_cut_off_is_told_that_the_gateway_was_stopped(gateway: Gateway) -> None:
    gateway.begin_one()
    gateway.cut_off()
    assert gateway.told.events[-1] == ev.ClientGone("stopped")


async def test_both_workers_of_a_route_are_to_say_again_what_they_have_to_do(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubted: list[tuple[str, int]] = []
    directory = gateway.presence.directory
    monkeypatch.setattr(directory, "doubt", lambda *who: doubted.append(who))
    prefill = ev.Worker("p", 3)
    gateway.surroundings.given(Route(prefill, DECODE, b"", b"", 0))
    gateway.surroundings.given(Route(prefill, None, b"", b"", 0))
    assert doubted == [("p", 3), (DECODE.name, DECODE.incarnation), ("p", 3)]


async def test_what_is_known_of_a_model_stays_known_when_its_workers_go(gateway: Gateway) -> None:
    announce = worker("d", "decode")
    waiting = asyncio.create_task(gateway.facts(RequestLimits()))
    await asyncio.sleep(0)
    gateway.presence_changed(Joined(announce))
    assert await waiting == announce.model
    gateway.presence_changed(Lost(announce, "left"))
    assert await gateway.facts(RequestLimits()) == announce.model


async def test_a_model_is_not_waited_for_once_its_worker_is_not_expected_back_any_more(
    gateway: Gateway,
) -> None:
    """Nothing tells of that moment."""
    gateway._returning = Returning(window_ms=100)
    gone = structs.replace(worker("d", "decode", state="starting"), model=None)
    gateway.presence_changed(Lost(gone, "silent"))
    limits = RequestLimits(worker_wait_ms_max=50, recovery_wait_ms_max=60_000)
    since_ms = gateway.clock.now_ms()
    async with asyncio.timeout(5):
        with pytest.raises(NotReady):
            await gateway.facts(limits)
    assert gateway.clock.now_ms() - since_ms >= 100, "for so long it was expected"
