"""The gateway as a process of its own: what stops its start, and how it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import nats
import pytest
from nats.aio.client import Client
from tests.unit.gateway.fake_mesh import FACTS, FakeMesh, FakeWorker
from tests.unit.gateway.support import MODEL, eventually, write_model

from pagemesh.gateway import service
from pagemesh.gateway.doors.connection import Connection
from pagemesh.gateway.doors.http import HttpDoor
from pagemesh.gateway.doors.next_turn import NextTurns
from pagemesh.runtime.bus import Bus
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.ports import free_port
from pagemesh.runtime.service import Stop
from pagemesh.runtime.service_config import load_service_config
from pagemesh.runtime.settings import BusConfig, GatewayConfig
from pagemesh.wire import subjects

SECRET = "0123456789abcdef0123456789abcdef"


@asynccontextmanager
async def gateway(
    nats_url: str, model_folder: Path, **variables: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """``pagemesh serve gateway``, killed at the end if it is still there."""
    clean = {key: text for key, text in os.environ.items() if not key.startswith("PAGEMESH_")}
    environ = clean | {
        "PAGEMESH_NATS": nats_url,
        "PAGEMESH_MODEL": str(model_folder),
        "PAGEMESH_SECRET": SECRET,
        **variables,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagemesh.cli", "serve", "gateway",
        env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"PAGEMESH_HTTP_PORT": "PORT"}, "PORT"),
        ({"PAGEMESH_NATS": "http://127.0.0.1:1"}, "PAGEMESH_NATS"),
        ({"PAGEMESH_API_KEYS": "short"}, "PAGEMESH_API_KEYS"),
        ({"PAGEMESH_SECRET": "changeme"}, "PAGEMESH_SECRET"),
        ({"PAGEMESH_CORS_ORIGINS": "http://a/"}, "PAGEMESH_CORS_ORIGINS: 'http://a/'"),
        ({"PAGEMESH_GENERATION_CONFIG": "vllm"}, "PAGEMESH_GENERATION_CONFIG"),
    ],
)
async def test_what_is_wrong_is_one_line_and_exit_code_2(
    shared_nats_server: NatsServer, model_folder: Path, variables: dict[str, str], named: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = {"PAGEMESH_HTTP_PORT": "0"}
        given |= {key: text.replace("PORT", port) for key, text in variables.items()}
        async with gateway(shared_nats_server.url, model_folder, **given) as process:
            async with asyncio.timeout(30):
                _, errors = await process.communicate()
    assert process.returncode == 2
    last = errors.decode().strip().splitlines()[-1]
    assert named.replace("PORT", port) in last
    assert "Traceback" not in errors.decode() and SECRET not in errors.decode()


@pytest.mark.parametrize(("source", "told"), [("auto", True), ("none", False)])
async def test_the_models_recommendations_are_taken_up_unless_that_is_switched_off(
    shared_nats_server: NatsServer, tmp_path: Path, source: str, told: bool
) -> None:
    folder = write_model(tmp_path / MODEL)
    (folder / "generation_config.json").write_text('{"temperature": 0.25}')
    port = free_port()
    given = {"PAGEMESH_HTTP_PORT": str(port), "PAGEMESH_GENERATION_CONFIG": source}
    name = f"decode-{source}"
    async with (
        Bus.connect(BusConfig(url=shared_nats_server.url), role="decode", name=name) as bus,
        FakeWorker(bus, name, "decode").running() as worker,
        gateway(shared_nats_server.url, folder, **given),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
    ):
        await _ready(http)
        await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
        assert worker.submits[-1].sampling.temperature == (0.25 if told else 1.0)
        [model] = (await http.get("/v1/models")).json()["data"]
        assert ("sampling_defaults" in model) is told


async def test_a_gateway_that_is_told_to_stop_finishes_what_runs(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with (
        Bus.connect(BusConfig(url=shared_nats_server.url), role="decode", name="w-stop") as bus,
        FakeWorker(bus, "decode-stop", "decode", pause_s=0.02).running(),
        gateway(shared_nats_server.url, model_folder, PAGEMESH_HTTP_PORT=str(port)) as process,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        assert FACTS.model == MODEL == model_folder.name
        await _ready(http)
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 60, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        async with asyncio.timeout(15):
            assert await process.wait() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
async def test_a_gateway_that_may_open_no_more_files_says_so_once(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    port = free_port()
    async with (
        gateway(shared_nats_server.url, model_folder, PAGEMESH_HTTP_PORT=str(port)) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
    ):
        await _answers(http, "/health/live", 200)
        limit = len(os.listdir(f"/proc/{process.pid}/fd")) + 10
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            await asyncio.sleep(3)  # it looks once a second
            metrics = (await http.get("/metrics")).text  # by a connection that it had before
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            output, errors = await process.communicate()
    told = [json.loads(line) for line in (output + errors).splitlines() if b"scarce" in line]
    assert [line["limit"] for line in told] == [limit]
    assert "LimitNOFILE" in told[0]["next"] and told[0]["level"] == "warning"
    [connections] = re.findall(r"^pagemesh_gateway_connections (\d+)", metrics, re.MULTILINE)
    assert float(connections) >= 10


async def test_an_answer_that_a_stop_cuts_short_ends_with_the_reason(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    port = free_port()
    brief = {"PAGEMESH_HTTP_PORT": str(port), "PAGEMESH_DRAIN_MS": "200"}
    async with (
        Bus.connect(BusConfig(url=shared_nats_server.url), role="decode", name="w-cut") as bus,
        FakeWorker(bus, "decode-cut", "decode", pause_s=0.1).running(),
        gateway(shared_nats_server.url, model_folder, **brief) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
    ):
        await _ready(http)
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 2_000, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line async for line in lines if line]
        assert '"code":"stopped"' in rest[-1] and "ask again" in rest[-1]


@pytest.mark.parametrize("with_http", [False, True])
async def test_callers_over_the_bus_are_told_too_and_the_limit_holds_with_both_doors_busy(
    shared_nats_server: NatsServer, model_folder: Path, with_http: bool
) -> None:
    port = free_port()
    brief = {"PAGEMESH_HTTP_PORT": str(port), "PAGEMESH_DRAIN_MS": "300"}
    name = f"decode-both-{with_http}"
    async with (
        Bus.connect(BusConfig(url=shared_nats_server.url), role="decode", name=name) as bus,
        FakeWorker(bus, name, "decode", pause_s=0.1).running() as worker,
        gateway(shared_nats_server.url, model_folder, **brief) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
        await nats.connect(shared_nats_server.url) as client,
    ):
        await _ready(http)
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 2_000}
        asked = [
            asyncio.create_task(_bus_error(client, body | {"stream": stream}))
            for stream in (False, True)
        ]
        if with_http:
            asked.append(asyncio.create_task(_http_error(http, body)))
        await eventually(lambda: worker.running_count == len(asked))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            await process.wait()
            errors = await asyncio.gather(*asked)
        assert [error["code"] for error in errors] == ["stopped"] * len(asked)
        await eventually(lambda: not worker.running_count)


async def test_callers_that_wait_for_a_worker_are_told_that_the_gateway_was_stopped(
    tmp_path: Path, model_folder: Path
) -> None:
    port = free_port()
    brief = {"PAGEMESH_HTTP_PORT": str(port), "PAGEMESH_DRAIN_MS": "300"}
    with NatsServer(tmp_path / "nats") as server:
        async with (
            gateway(server.url, model_folder, **brief) as process,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
            await nats.connect(server.url) as client,
        ):
            await _answers(http, "/health/live", 200)
            body: dict[str, object] = {"model": MODEL, "prompt": "abc"}
            asked = [
                asyncio.create_task(ask)
                for ask in (_bus_error(client, body), _http_error(http, body))
            ]
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            errors = await asyncio.gather(*asked)
    assert [error["code"] for error in errors] == ["stopped", "stopped"]


async def test_who_connects_in_the_moment_of_a_stop_does_not_hold_it_up(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody told it, and it was waited for until it left."""
    accepted = asyncio.Event()
    connect = Connection.connection_made

    def late(connection: Connection, transport: asyncio.Transport) -> None:
        accepted.set()
        asyncio.get_running_loop().call_later(0.05, connect, connection, transport)

    monkeypatch.setattr(Connection, "connection_made", late)
    door = HttpDoor(mesh.front, GatewayConfig(http_port=0))
    async with asyncio.timeout(20):
        async with door.serve() as address:
            url = httpx.URL(address)
            reader, writer = await asyncio.open_connection(url.host, url.port)
            await accepted.wait()
            asyncio.get_running_loop().call_later(5.0, writer.close)  # or the test never ended
        assert not writer.is_closing()
        assert await reader.read() == b""
    writer.close()


async def test_what_a_gateway_would_tokenise_is_forgotten_when_it_is_cut_off(
    shared_nats_server: NatsServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended only when all of it was done."""
    port = free_port()
    environ = {"PAGEMESH_NATS": shared_nats_server.url, "PAGEMESH_MODEL": str(model_folder)}
    environ |= {"PAGEMESH_NAME": "g-cut", "PAGEMESH_SECRET": SECRET}
    environ |= {"PAGEMESH_HTTP_PORT": str(port)}
    monkeypatch.setattr(service, "spare_loaded", lambda: None)  # the tests go on
    closed: list[NextTurns] = []
    close = NextTurns.close

    def noted(turns: NextTurns) -> None:
        closed.append(turns)
        close(turns)

    monkeypatch.setattr(NextTurns, "close", noted)
    running = asyncio.create_task(service.run(load_service_config(environ), Stop()))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        await _answers(http, "/health/live", 200)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(closed) == 1


async def test_a_gateway_that_is_there_before_nats_is_live_and_becomes_ready(
    model_folder: Path, tmp_path: Path
) -> None:
    server = NatsServer(tmp_path / "nats")
    port = free_port()
    async with (
        gateway(server.url, model_folder, PAGEMESH_HTTP_PORT=str(port)) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        await _answers(http, "/health/live", 200)
        assert (await http.get("/health/ready")).status_code == 503
        refused = await http.post("/v1/completions", json={"model": MODEL, "prompt": "abc"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        try:
            await asyncio.to_thread(server.start)
            async with (
                Bus.connect(BusConfig(url=server.url), role="decode", name="w-late") as bus,
                FakeWorker(bus, "decode-late", "decode").running(),
            ):
                await _ready(http)
                asked = await http.post("/v1/completions", json={"model": MODEL, "prompt": "abc"})
                assert asked.status_code == 200
        finally:
            await asyncio.to_thread(server.stop)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):
            _, errors = await process.communicate()
    assert process.returncode == 0
    lines = [line for line in errors.decode().splitlines() if "bus.unreachable" in line]
    assert lines and server.url in lines[0]


async def _http_error(http: httpx.AsyncClient, body: dict[str, object]) -> dict[str, str]:
    error: dict[str, str] = (await http.post("/v1/completions", json=body)).json()["error"]
    return error


async def _bus_error(client: Client, body: dict[str, object]) -> dict[str, str]:
    """The error at the end of an answer."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    await client.publish(subjects.COMPLETIONS, json.dumps(body).encode(), reply=inbox)
    async for message in subscription.messages:
        if "pagemesh-last" in (message.headers or {}):
            error: dict[str, str] = json.loads(message.data)["error"]
            return error
    raise AssertionError("the answer had no end")


async def _ready(http: httpx.AsyncClient) -> None:
    await _answers(http, "/health/ready", 200)


async def _answers(http: httpx.AsyncClient, path: str, status: int) -> None:
    for _ in range(300):
        try:
            if (await http.get(path)).status_code == status:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.1)
    raise AssertionError(f"{path} did not answer {status}")
