"""The bus while its server dies, freezes, comes back or was never there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pagemesh.runtime.bus import Bus, BusState, Delivery
from pagemesh.runtime.bus.nats_client import DirectClient
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.ports import free_port
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire.errors import Busy, ConfigError, DeadlineExceeded, Disconnected, Fault, Malformed


def echo(delivery: Delivery) -> None:
    delivery.respond(delivery.data)


def ignore(_delivery: Delivery) -> None:
    """Admit and never answer."""


async def reaches(bus: Bus, wanted: BusState) -> None:
    reached = asyncio.Event()
    bus.on_state(lambda state: reached.set() if state is wanted else None)
    if bus.state is not wanted:
        async with asyncio.timeout(5):
            await reached.wait()


async def asks_until_answered(bus: Bus, subject: str, *, timeout_ms: int) -> bytes:
    deadline = time.monotonic() + timeout_ms / 1_000
    while True:
        try:
            return (await bus.request(subject, b"x", timeout_ms=500)).data
        except Fault:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.02)


async def test_what_waits_when_the_server_is_killed_fails_at_once(
    nats_server: NatsServer,
) -> None:
    async with Bus.connect(BusConfig(url=nats_server.url), role="client", name="a") as bus:
        await bus.subscribe("t.wait", ignore)
        waiting = [
            asyncio.create_task(bus.request("t.wait", b"", timeout_ms=30_000)) for _ in range(50)
        ]
        await bus.barrier()
        started = time.monotonic()
        nats_server.kill()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, Disconnected) for end in ends)
        assert time.monotonic() - started < 1.0
        assert bus.state is BusState.RECONNECTING


async def test_sending_without_a_server_fails_at_once_and_nothing_is_kept_back(
    nats_server: NatsServer,
) -> None:
    seen: list[bytes] = []
    async with Bus.connect(BusConfig(url=nats_server.url), role="client", name="a") as bus:
        await bus.subscribe("t.late", lambda delivery: seen.append(delivery.data))
        nats_server.kill()
        await reaches(bus, BusState.RECONNECTING)
        started = time.monotonic()
        for _ in range(5_000):
            with pytest.raises(Disconnected):
                bus.publish("t.late", b"x" * 1_024)
        with pytest.raises(Disconnected):
            await bus.request("t.late", b"", timeout_ms=30_000)
        with pytest.raises(Disconnected):
            await bus.barrier()
        assert time.monotonic() - started < 2.0
        nats_server.start()
        await bus.wait_connected(timeout_ms=5_000)
        bus.publish("t.late", b"new")
        await bus.barrier()
        await asyncio.sleep(0.05)
    assert seen == [b"new"]


async def test_a_bus_is_closed_at_once_at_every_moment_of_a_reconnect(
    nats_server: NatsServer,
) -> None:
    async def close_after(turns: int) -> None:
        async with Bus.connect(BusConfig(url=nats_server.url), role="client", name="a") as bus:
            lost = asyncio.Event()
            bus.on_state(lambda state: lost.set() if state is BusState.RECONNECTING else None)
            nats_server.kill()
            nats_server.start()
            await lost.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
        assert bus.state is BusState.CLOSED

    for turns in range(24):
        async with asyncio.timeout(5):
            await close_after(turns)


@pytest.mark.parametrize("fails", [False, True])
async def test_who_is_cancelled_while_it_connects_is_so_though_the_client_swallows_it(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    connect, begun = DirectClient.connect, asyncio.Event()

    async def swallow(client: DirectClient, **options: Any) -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if fails:
            raise ConnectionRefusedError
        await connect(client, **options)

    async def stay() -> None:
        config = BusConfig(url=nats_server.url)
        async with Bus.connect(config, role="client", name="a", patient=True):
            await asyncio.Event().wait()

    monkeypatch.setattr(DirectClient, "connect", swallow)
    task = asyncio.create_task(stay())
    await begun.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=2.0)
    was_cancelled = task.cancelled()
    task.cancel()
    await asyncio.wait({task})
    assert was_cancelled


async def test_a_restarted_server_is_found_and_subscriptions_work_again(
    nats_server: NatsServer,
) -> None:
    config = BusConfig(url=nats_server.url)
    states: list[BusState] = []
    async with (
        Bus.connect(config, role="client", name="a") as asker,
        Bus.connect(config, role="client", name="b") as answerer,
    ):
        asker.on_state(states.append)
        await answerer.subscribe("t.echo", echo)
        for _ in range(3):
            nats_server.kill()
            await asyncio.sleep(0.2)
            nats_server.start()
            assert await asks_until_answered(asker, "t.echo", timeout_ms=10_000) == b"x"
    assert states == [*([BusState.RECONNECTING, BusState.CONNECTED] * 3), BusState.CLOSED]


async def test_a_subscription_made_without_a_server_works_once_there_is_one(
    nats_server: NatsServer,
) -> None:
    async with Bus.connect(BusConfig(url=nats_server.url), role="client", name="a") as bus:
        nats_server.kill()
        await reaches(bus, BusState.RECONNECTING)
        await bus.subscribe("t.early", echo)
        nats_server.start()
        assert await asks_until_answered(bus, "t.early", timeout_ms=10_000) == b"x"


async def test_a_frozen_server_is_noticed_within_three_seconds(nats_server: NatsServer) -> None:
    async with Bus.connect(BusConfig(url=nats_server.url), role="client", name="a") as bus:
        await bus.subscribe("t.echo", echo)
        nats_server.freeze()
        try:
            started = time.monotonic()
            with pytest.raises(Disconnected, match="no sign of life"):
                await bus.request("t.echo", b"", timeout_ms=30_000)
            assert time.monotonic() - started < 3.0
            assert bus.state is BusState.RECONNECTING
        finally:
            nats_server.thaw()
        assert await asks_until_answered(bus, "t.echo", timeout_ms=10_000) == b"x"


async def test_a_server_answers_nothing_once_it_was_frozen(nats_server: NatsServer) -> None:
    """Each of its threads stands, also those that were about to answer (one in fifty did)."""
    async with Bus.connect(BusConfig(url=nats_server.url), role="client", name="a") as bus:
        await bus.subscribe("t.echo", echo)
        for _ in range(100):
            await bus.request("t.echo", b"", timeout_ms=2_000)
            nats_server.freeze()
            try:
                with pytest.raises(DeadlineExceeded):
                    await bus.request("t.echo", b"", timeout_ms=15)
            finally:
                nats_server.thaw()


async def test_a_frozen_server_is_noticed_with_every_buffer_full(nats_server: NatsServer) -> None:
    config = BusConfig(url=nats_server.url, output_bytes_max=4 << 20)
    async with Bus.connect(config, role="client", name="a") as bus:
        await bus.subscribe("t.echo", echo)
        nats_server.freeze()
        try:
            started = time.monotonic()
            refused = ""
            while not refused and time.monotonic() - started < 2.0:
                try:
                    bus.publish("t.full", b"x" * 65_536)
                    await asyncio.sleep(0)
                except Busy as fault:
                    refused = fault.code
            assert refused == "Busy"
            await reaches(bus, BusState.RECONNECTING)
            assert time.monotonic() - started < 3.0
        finally:
            nats_server.thaw()
        assert await asks_until_answered(bus, "t.echo", timeout_ms=10_000) == b"x"


async def test_a_loop_that_stood_still_does_not_take_the_server_for_dead(
    nats_server: NatsServer,
) -> None:
    config = BusConfig(url=nats_server.url, heartbeat_ms=50, heartbeat_timeout_ms=200)
    async with Bus.connect(config, role="client", name="a") as bus:
        await asyncio.sleep(0.2)
        for _ in range(3):
            time.sleep(0.8)  # noqa: ASYNC251  (the stall is what is tested)
            await asyncio.sleep(0.15)
        assert bus.counters.connects == 0
        assert bus.state is BusState.CONNECTED


async def test_no_server_at_start_is_one_clear_error_in_time() -> None:
    config = BusConfig(url=f"nats://user:hush@127.0.0.1:{free_port()}", start_wait_ms=300)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"no NATS server at nats://127\.0\.0\.1:\d+") as caught:
        async with Bus.connect(config, role="client", name="a"):
            pytest.fail("there is no server")
    assert time.monotonic() - started < 3.0
    assert "hush" not in str(caught.value)
    assert "PAGEMESH_NATS" in str(caught.value)
    assert "in 0.3 s: connection refused; start one there" in str(caught.value)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
async def test_a_host_that_nobody_knows_is_told_without_jargon(host: str) -> None:
    config = BusConfig(url=f"nats://{host}:4222", start_wait_ms=0)
    with pytest.raises(ConfigError, match="no host of that name is known; start one"):
        async with Bus.connect(config, role="client", name="a"):
            pytest.fail("there is no server")


async def test_a_port_that_accepts_and_says_nothing_is_given_up_in_time() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other side gives up
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = BusConfig(url=f"nats://127.0.0.1:{port}", connect_timeout_ms=200, start_wait_ms=300)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"no NATS server .* nothing answers"):
        async with Bus.connect(config, role="client", name="a"):
            pytest.fail("there is no server")
    assert time.monotonic() - started < 3.0
    server.close()
    await asyncio.sleep(0.05)


async def test_a_patient_bus_starts_without_a_server_and_finds_it_later(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    config = BusConfig(url=server.url)
    async with Bus.connect(config, role="client", name="a", patient=True) as bus:
        assert bus.state is BusState.CONNECTING
        with pytest.raises(Disconnected):
            bus.publish("t.x", b"")
        await bus.subscribe("t.echo", echo)
        with pytest.raises(Disconnected):
            await bus.wait_connected(timeout_ms=100)
        try:
            server.start()
            assert await asks_until_answered(bus, "t.echo", timeout_ms=10_000) == b"x"
        finally:
            server.stop()


async def test_who_comes_to_listen_while_the_bus_connects_is_heard(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats")
    config = BusConfig(url=server.url, reconnect_wait_ms=5)
    async with Bus.connect(config, role="client", name="a", patient=True) as bus:
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        try:
            subjects: list[str] = []
            while bus.state is not BusState.CONNECTED:
                subjects.append(f"t.echo.{len(subjects)}")
                await bus.subscribe(subjects[-1], echo)
                await asyncio.sleep(0.0005)
            await starting
            for subject in subjects:
                assert (await bus.request(subject, b"x", timeout_ms=2_000)).data == b"x"
        finally:
            server.stop()


async def test_a_patient_bus_does_not_wait_for_credentials_to_become_right(tmp_path: Path) -> None:
    extra = 'authorization { user: "u", password: "right" }\n'
    with NatsServer(tmp_path / "nats", extra=extra) as server:
        config = BusConfig(url=server.url.replace("//", "//u:wrong@"))
        with pytest.raises(ConfigError, match="refused user and password"):
            async with Bus.connect(config, role="client", name="a", patient=True):
                pytest.fail("the password is wrong")


@pytest.mark.parametrize("url", ["", "http://x:1", "nats://", "nats://host:99999", "127.0.0.1"])
async def test_an_url_that_is_none_of_nats_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="PAGEMESH_NATS"):
        async with Bus.connect(BusConfig(url=url), role="client", name="a"):
            pytest.fail("that is no URL")


async def test_refused_credentials_are_a_config_error_at_once(tmp_path: Path) -> None:
    extra = 'authorization { user: "u", password: "right" }\n'
    with NatsServer(tmp_path / "nats", extra=extra) as server:
        config = BusConfig(url=server.url.replace("//", "//u:wrong@"))
        started = time.monotonic()
        with pytest.raises(ConfigError, match="refused user and password") as caught:
            async with Bus.connect(config, role="client", name="a"):
                pytest.fail("the password is wrong")
        assert time.monotonic() - started < 1.0
        told = str(caught.value)
        assert f"server at {server.url} refused" in told and "wrong" not in told
        assert "PAGEMESH_NATS_USER (--nats-user)" in told and "PAGEMESH_NATS_PASSWORD" in told


async def test_the_limit_of_the_server_that_is_there_now_counts(tmp_path: Path) -> None:
    port = free_port()
    with NatsServer(tmp_path / "big", port=port, message_bytes_max=100_000) as big:
        async with Bus.connect(BusConfig(url=big.url), role="client", name="a") as bus:
            await bus.subscribe("t.echo", echo)
            assert len((await bus.request("t.echo", b"x" * 90_000, timeout_ms=2_000)).data)
            big.kill()
            with NatsServer(tmp_path / "small", port=port, message_bytes_max=10_000):
                await asks_until_answered(bus, "t.echo", timeout_ms=10_000)
                with pytest.raises(Malformed, match="10000"):
                    await bus.request("t.echo", b"x" * 90_000, timeout_ms=2_000)
                assert (await bus.request("t.echo", b"y", timeout_ms=2_000)).data == b"y"


async def test_a_bus_reconnects_however_often_the_server_dies(nats_server: NatsServer) -> None:
    config = BusConfig(url=nats_server.url, reconnect_wait_ms=5, reconnect_wait_ms_max=20)
    async with Bus.connect(config, role="client", name="a") as bus:
        for _ in range(10):
            nats_server.kill()
            await reaches(bus, BusState.RECONNECTING)
            nats_server.start()
            await reaches(bus, BusState.CONNECTED)
        tasks = asyncio.all_tasks()
        assert len(tasks) < 20, f"tasks pile up: {len(tasks)}"


async def test_a_user_that_cannot_hear_answers_is_a_config_error(tmp_path: Path) -> None:
    extra = (
        'authorization { users: [ { user: "u", password: "p", permissions: {'
        ' publish: [">"], subscribe: ["_INBOX.>"] } } ] }\n'
    )
    with NatsServer(tmp_path / "nats", extra=extra) as server:
        config = BusConfig(url=server.url.replace("//", "//u:p@"))
        with pytest.raises(
            ConfigError, match=r"may not listen on _INBOX_pager\.a\.>.* as the role pager"
        ):
            async with Bus.connect(config, role="pager", name="a"):
                pytest.fail("it would never hear an answer")


async def test_a_wrong_subject_is_refused_even_before_there_is_a_server() -> None:
    config = BusConfig(url=f"nats://127.0.0.1:{free_port()}")
    async with Bus.connect(config, role="client", name="a", patient=True) as bus:
        for subject in ("", "a b", "a\r\nb", "\u00e4"):
            with pytest.raises(Malformed):
                await bus.subscribe(subject, ignore)


@pytest.mark.parametrize(("patient", "count"), [(True, 1), (False, 0)])
async def test_a_service_says_once_that_the_server_carries_less_than_is_wanted(
    tmp_path: Path, patient: bool, count: int
) -> None:
    with (
        NatsServer(tmp_path / "nats", message_bytes_max=1 << 20) as server,
        capture_logs() as logs,
    ):
        config = BusConfig(url=server.url, reconnect_wait_ms=5)
        async with Bus.connect(config, role="client", name="a", patient=patient) as bus:
            server.kill()
            await reaches(bus, BusState.RECONNECTING)
            server.start()
            await reaches(bus, BusState.CONNECTED)
    told = [line for line in logs if line["event"] == "bus.small_messages"]
    assert [line["bytes_max"] for line in told] == [1 << 20] * count
    assert all("max_payload" in line["advice"] for line in told)
