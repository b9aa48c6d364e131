"""Presence and discovery over a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgpack
import pytest
from structlog.testing import capture_logs

from pagemesh.cli import up
from pagemesh.cli.mesh.roster import check_host_is_free
from pagemesh.cli.mesh.screen import Screen
from pagemesh.cli.mesh.up_config import UpConfig
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.clock import MonotonicClock
from pagemesh.runtime.directory import Change, Changed, Joined, Lost
from pagemesh.runtime.discovery import Discovery, Endpoint, ServiceFacts, discoverable
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.presence import Presence
from pagemesh.runtime.rpc import send
from pagemesh.runtime.service_config import load_service_config
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire import subjects
from pagemesh.wire.errors import Absent, ConfigError, DeadlineExceeded
from pagemesh.wire.presence import Announce, AskPresence, Role

CLOCK = MonotonicClock()


@contextlib.asynccontextmanager
async def present(
    server: NatsServer,
    role: Role,
    name: str,
    incarnation: int,
    changes: list[Change],
    *,
    period_ms: int = 100,
    lost_after_ms: int = 500,
) -> AsyncIterator[asyncio.Task[None]]:
    """A service with presence, announcing itself quickly."""
    announce = Announce(role=role, name=name, incarnation=incarnation, host="h", state="ready")
    async with Bus.connect(BusConfig(url=server.url), role=role, name=name) as bus:
        presence = Presence(
            bus, CLOCK, lambda: announce, changes.append,
            period_ms=period_ms, lost_after_ms=lost_after_ms,
        )  # fmt: skip
        task = asyncio.create_task(presence.run(), name=f"presence-{name}")
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(wanted: Callable[[], bool], *, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not wanted():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def kinds(changes: list[Change], name: str) -> list[str]:
    return [
        type(change).__name__ + (f":{change.reason}" if isinstance(change, Lost) else "")
        for change in changes
        if change.announce.name == name and not isinstance(change, Changed)
    ]


async def test_a_newcomer_knows_everybody_and_is_known_within_a_moment(
    nats_server: NatsServer,
) -> None:
    seen: dict[str, list[Change]] = {"gw": [], "w1": [], "w2": []}
    async with (
        present(nats_server, "gateway", "gw", 1, seen["gw"]),
        present(nats_server, "decode", "w1", 2, seen["w1"]),
        present(nats_server, "prefill", "w2", 3, seen["w2"]),
    ):
        started = time.monotonic()
        await until(lambda: all(kinds(seen[a], b) == ["Joined"] for a in seen for b in seen))
        assert time.monotonic() - started < 2.0


async def test_leaving_and_silence_are_told_apart(nats_server: NatsServer) -> None:
    changes: list[Change] = []
    async with present(nats_server, "gateway", "gw", 1, changes):
        async with present(nats_server, "decode", "polite", 2, []):
            await until(lambda: kinds(changes, "polite") == ["Joined"])
        await until(lambda: kinds(changes, "polite") == ["Joined", "Lost:left"])
        mute = Announce(role="decode", name="mute", incarnation=3, host="h", state="ready")
        async with Bus.connect(BusConfig(url=nats_server.url), role="decode", name="m") as bus:
            send(bus, subjects.PRESENCE, mute)
        await until(lambda: kinds(changes, "mute") == ["Joined", "Lost:silent"])


async def test_a_restarted_service_replaces_its_former_life(nats_server: NatsServer) -> None:
    changes: list[Change] = []
    async with present(nats_server, "gateway", "gw", 1, changes):
        async with (
            present(nats_server, "decode", "w", 2, []),
            Bus.connect(BusConfig(url=nats_server.url), role="decode", name="w") as bus,
        ):
            await until(lambda: kinds(changes, "w") == ["Joined"])
            again = Announce(role="decode", name="w", incarnation=9, host="h", state="ready")
            send(bus, subjects.PRESENCE, again)
            await until(lambda: len(kinds(changes, "w")) >= 3)
    assert kinds(changes, "w")[:3] == ["Joined", "Lost:replaced", "Joined"]


async def test_a_second_mesh_of_one_host_at_one_server_is_refused(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    settings = {"PAGEMESH_NATS": nats_server.url, "PAGEMESH_POOL_DIR": str(tmp_path / "pools")}
    config = load_service_config({**settings, "PAGEMESH_HOST": "h"})
    async with present(nats_server, "pager", "pager-1", 1, []):
        with pytest.raises(ConfigError, match=r"^a mesh of host h uses .* already; .*\(--host\)$"):
            await up.run_mesh(up.MeshPlan(UpConfig(), config, own_nats=False), Screen())
        assert not (tmp_path / "pools").exists(), "before anything was made"
        async with Bus.connect(config.bus, role="operator", name="up") as bus:
            await check_host_is_free(bus, "another")
    async with Bus.connect(config.bus, role="operator", name="up") as bus:
        looking = asyncio.create_task(check_host_is_free(bus, "h"))
        async with present(nats_server, "pager", "pager-2", 2, []):
            await asyncio.sleep(0.5)
            assert not looking.done()
        await looking  # it was about to leave


async def test_a_server_that_was_away_makes_nobody_lost(nats_server: NatsServer) -> None:
    changes: list[Change] = []
    async with (
        present(nats_server, "gateway", "gw", 1, changes),
        present(nats_server, "decode", "w", 2, []),
    ):
        await until(lambda: kinds(changes, "w") == ["Joined"])
        nats_server.kill()
        await asyncio.sleep(1.2)
        nats_server.start()
        await asyncio.sleep(1.0)
        assert kinds(changes, "w") == ["Joined"]


async def test_who_stood_still_counts_nobody_as_lost_who_announced_itself_meanwhile(
    nats_server: NatsServer,
) -> None:
    changes: list[Change] = []
    over = threading.Event()

    async def announce() -> None:
        async with present(nats_server, "decode", "w1", 2, []):
            await asyncio.to_thread(over.wait)

    elsewhere = threading.Thread(target=asyncio.run, args=[announce()])
    elsewhere.start()
    try:
        async with present(nats_server, "gateway", "gw", 1, changes):
            await until(lambda: kinds(changes, "w1") == ["Joined"])
            asyncio.get_running_loop().call_soon(time.sleep, 1.5)
            await asyncio.sleep(2.0)
            assert kinds(changes, "w1") == ["Joined"]
    finally:
        over.set()
        elsewhere.join()


async def test_garbage_on_the_presence_subject_changes_nothing(nats_server: NatsServer) -> None:
    changes: list[Change] = []
    async with (
        present(nats_server, "gateway", "gw", 1, changes) as task,
        Bus.connect(BusConfig(url=nats_server.url), role="decode", name="evil") as bus,
    ):
        await until(lambda: kinds(changes, "gw") == ["Joined"])
        for garbage in (b"", b"\x80\x04N.", b"\xff" * 100, b"\x93\x01\xa2ok\x80"):
            bus.publish(subjects.PRESENCE, garbage)
        await bus.barrier()
        await asyncio.sleep(0.2)
        assert not task.done()
        assert [change for change in changes if not isinstance(change, Joined)] == []


async def test_an_announcement_of_another_version_is_told_of_once(nats_server: NatsServer) -> None:
    changes: list[Change] = []
    newer = {"role": "pager", "name": "p1", "host": "h", "heat": 1}
    data: bytes = msgpack.packb([1, "presence.announce", newer])
    with capture_logs() as logs:
        async with (
            present(nats_server, "gateway", "gw", 1, changes),
            Bus.connect(BusConfig(url=nats_server.url), role="decode", name="newer") as bus,
        ):
            await until(lambda: kinds(changes, "gw") == ["Joined"])
            for _ in range(3):
                bus.publish(subjects.PRESENCE, data)
            await until(lambda: bool(logs))
            await bus.barrier()
    [line] = [line for line in logs if line["event"] == "presence.not_understood"]
    assert line["sender"] == {"role": "pager", "name": "p1", "host": "h"}
    assert "heat" in str(line["error"]) and "one version" in line["next"]


async def test_who_may_only_ask_is_answered_and_can_forge_no_good_bye(
    nats_server: NatsServer,
) -> None:
    changes: list[Change] = []
    heard: list[bytes] = []
    async with (
        present(nats_server, "gateway", "gw", 1, changes, period_ms=60_000, lost_after_ms=60_000),
        Bus.connect(BusConfig(url=nats_server.url), role="operator", name="o") as bus,
    ):
        await until(lambda: kinds(changes, "gw") == ["Joined"])
        await bus.subscribe(subjects.PRESENCE, lambda delivery: heard.append(delivery.data))
        forged = Announce(role="gateway", name="gw", incarnation=1, host="h", state="leaving")
        send(bus, subjects.ASK_PRESENCE, forged)
        send(bus, subjects.ASK_PRESENCE, AskPresence())
        await until(lambda: len(heard) == 1)
        assert kinds(changes, "gw") == ["Joined"]


FACTS = ServiceFacts(
    name="pagemesh",
    version="1.2.3",
    description="An example.",
    endpoints=(Endpoint("chat", "pagemesh.v1.chat.completions", "gateway"),),
)


async def ask_all(bus: Bus, subject: str) -> list[dict[str, object]]:
    found = []
    async with bus.request_many(subject, b"") as inbox:
        with contextlib.suppress(DeadlineExceeded):
            while True:
                found.append(json.loads((await inbox.receive(timeout_ms=200)).data))
    return found


@pytest.mark.parametrize("verb", ["PING", "INFO", "STATS"])
async def test_every_instance_answers_discovery_by_verb_name_and_id(bus: Bus, verb: str) -> None:
    async with discoverable(bus, FACTS) as one, discoverable(bus, FACTS) as two:
        both = {one.id, two.id}
        for subject in (f"$SRV.{verb}", f"$SRV.{verb}.pagemesh"):
            answers = await ask_all(bus, subject)
            assert {answer["id"] for answer in answers} == both
        (mine,) = await ask_all(bus, f"$SRV.{verb}.pagemesh.{one.id}")
        assert mine["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
        assert (mine["name"], mine["version"]) == ("pagemesh", "1.2.3")


@pytest.mark.parametrize("reply", [subjects.worker("w"), subjects.worker("w").upper()])
async def test_nobody_speaks_to_a_service_through_discovery(bus: Bus, reply: str) -> None:
    heard: list[Delivery] = []
    await bus.subscribe(reply, heard.append)
    async with discoverable(bus, FACTS):
        bus.publish("$SRV.PING", b"", reply=reply)
        assert len(await ask_all(bus, "$SRV.PING")) == 1
    assert not heard


async def test_stats_count_requests_errors_and_time(bus: Bus) -> None:
    async with discoverable(bus, FACTS) as discovery:
        discovery.record("chat", duration_us=1_000)
        discovery.record("chat", duration_us=3_000, error="NoCapacity")
        (answer,) = await ask_all(bus, f"$SRV.STATS.pagemesh.{discovery.id}")
        (info,) = await ask_all(bus, f"$SRV.INFO.pagemesh.{discovery.id}")
    place = {
        "name": "chat", "subject": "pagemesh.v1.chat.completions", "queue_group": "gateway",
        "metadata": {},
    }  # fmt: skip
    assert info["endpoints"] == [place]
    assert answer["endpoints"] == [
        place
        | {
            "num_requests": 2,
            "num_errors": 1,
            "last_error": "NoCapacity",
            "processing_time": 4_000_000,
            "average_processing_time": 2_000_000,
        }
    ]
    assert str(answer["started"]).endswith("Z")


async def test_a_service_that_left_is_discovered_no_more(bus: Bus) -> None:
    async with discoverable(bus, FACTS) as discovery:
        assert isinstance(discovery, Discovery)
        subject = f"$SRV.PING.pagemesh.{discovery.id}"
        assert len(await ask_all(bus, subject)) == 1
    async with bus.request_many(subject, b"") as inbox:
        with pytest.raises(Absent):
            await inbox.receive(timeout_ms=2_000)
