"""The HTTP door's edges: bad bodies, keys, health, slow readers, errors on the way."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.unit.gateway.fake_mesh import FakeMesh, fake_mesh
from tests.unit.gateway.support import MODEL, eventually

from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.events import Worker
from pagemesh.gateway.calls.spec import RequestLimits
from pagemesh.gateway.doors import connection
from pagemesh.gateway.doors.connection import HEAD_BYTES_MAX
from pagemesh.gateway.doors.http import HttpDoor
from pagemesh.gateway.doors.off_loop import THREAD_BYTES_MIN
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.settings import GatewayConfig
from pagemesh.wire.errors import Busy, ConfigError, NoCapacity

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
KEY = "k" * 20


@pytest.fixture
async def http(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as made:
        yield made


def error_of(answer: httpx.Response) -> dict[str, object]:
    """The error object, which always has all four fields."""
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, object] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"nonsense",
        b'{"model":"tiny","prompt":"\xff\xfe"}',
        b'{"model":"tiny","prompt":"\\ud800"}',
        b'{"model":"tiny","prompt":' + b"[" * 200_000,
        b'{"model":"tiny","prompt":[1,"a"]}',
        b'{"model":"tiny","prompt":[]}',
        b'{"model":"tiny","prompt":""}',
        b'{"model":"tiny","prompt":"x","max_tokens":1e400}',
        b'{"model":"tiny","prompt":"x","metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"tiny"}',
        b'{"model":1,"prompt":"x"}',
    ],
)
async def test_a_body_that_makes_no_sense_is_400(http: httpx.AsyncClient, body: bytes) -> None:
    answer = await http.post(TEXT, content=body)
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "invalid_request_error"


async def test_a_body_without_a_model_is_answered_by_the_one_that_is_served(
    http: httpx.AsyncClient,
) -> None:
    answer = await http.post(TEXT, json={"prompt": "abc", "max_tokens": 2})
    assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
    wrong = await http.post(TEXT, json={"model": "another", "prompt": "abc"})
    assert (wrong.status_code, error_of(wrong)["code"]) == (404, "model_not_found")


async def test_a_body_above_the_limit_is_413(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    config = GatewayConfig(http_port=0, body_bytes_max=2_000)
    async with (
        fake_mesh(shared_nats_server.url, model_folder, config=config) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        assert (await http.post(TEXT, content=b"x" * 2_001)).status_code == 413

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(30):
                yield b"x" * 100

        assert (await http.post(TEXT, content=parts())).status_code == 413


async def test_unknown_paths_and_methods_are_told_in_the_same_form(http: httpx.AsyncClient) -> None:
    missing = await http.get("/v1/nothing")
    assert missing.status_code == 404 and error_of(missing)["code"] == "unknown_url"
    assert "'/v1/nothing'" in missing.text
    without_v1 = await http.post("/chat/completions", json={})
    assert without_v1.status_code == 404 and "begin with /v1" in without_v1.text
    wrong = await http.get(CHAT)
    assert error_of(wrong)["message"] == "this path takes POST"
    assert wrong.status_code == 405 and error_of(wrong)["type"] == "invalid_request_error"
    assert wrong.headers["allow"] == "POST"


async def test_a_request_id_is_echoed_when_it_is_harmless(http: httpx.AsyncClient) -> None:
    answer = await http.get("/version", headers={"X-Request-Id": "mine-42"})
    assert answer.headers["x-request-id"] == "mine-42"
    for harmful in ("a b", "x" * 500, "\u00e9"):
        answer = await http.get("/version", headers={b"X-Request-Id": harmful.encode("latin-1")})
        assert len(answer.headers["x-request-id"]) == 32


async def test_health_version_metrics_and_tokens_are_served(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    assert (await http.get("/health/live")).status_code == 200
    await eventually(lambda: not mesh.front.gateway.unready_why)
    assert (await http.get("/health/ready")).status_code == 200
    assert (await http.get("/health")).json() == {"status": "ready"}
    assert "version" in (await http.get("/version")).json()
    metrics = await http.get("/metrics")
    assert "pagemesh_gateway_requests_in_flight" in metrics.text
    assert "vllm:" not in metrics.text
    ids = (await http.post("/tokenize", json={"prompt": "the end"})).json()["tokens"]
    back = await http.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": "the end"}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    counted = (await http.post("/tokenize", json=chat)).json()
    shown = mesh.front.tokens.decode(counted["tokens"])
    assert (shown, counted["count"]) == ("[user]x<|end|>[assistant]", len(counted["tokens"]))


async def test_the_roots_that_a_prompt_is_cached_under_are_those_of_its_requests(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    for salt in ({}, {"cache_salt": "s" * 512}):
        body = {"prompt": "the end", "max_tokens": 1, **salt}
        assert (await http.post(TEXT, json=body)).status_code == 200
        told = (await http.post("/tokenize", json={"prompt": "the end", **salt})).json()
        assert told["cache_roots"] == [mesh.worker.submits[-1].root.hex()]
    for salt in ({"cache_salt": ""}, {"cache_salt": "s" * 513}):
        refused = await http.post("/tokenize", json={"prompt": "the end", **salt})
        assert refused.status_code == 400 and error_of(refused)["param"] == "cache_salt"


async def test_who_serves_is_looked_up_on_the_event_loop_however_long_the_prompt(
    mesh: FakeMesh, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    roots_of = mesh.front.cache_roots

    def look_up(tenant: str, salt: str) -> list[str]:
        threads.append(threading.get_ident())
        return roots_of(tenant, salt)

    monkeypatch.setattr(mesh.front, "cache_roots", look_up)
    await http.post("/tokenize", json={"prompt": "x" * THREAD_BYTES_MIN})
    assert threads == [threading.get_ident()]


async def test_a_gateway_without_workers_is_live_and_not_ready(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with (
        fake_mesh(shared_nats_server.url, model_folder, roles=()) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/health/ready")).status_code == 503
        answer = await http.get("/health")
        assert answer.status_code == 503
        assert answer.json() == {"status": "not ready", "reason": "no worker is ready"}
        mesh.front.gateway.state = "draining"
        assert (await http.get("/health")).json()["reason"] == "the gateway is draining"


async def test_the_four_foreign_gauges_are_there_for_who_asks(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    config = GatewayConfig(http_port=0, vllm_metrics=True)
    async with (
        fake_mesh(shared_nats_server.url, model_folder, config=config) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        await eventually(lambda: not mesh.front.gateway.unready_why)
        text = (await http.get("/metrics")).text
    assert 'vllm:num_requests_running{model_name="tiny"} 0' in text
    assert 'vllm:num_requests_waiting{model_name="tiny"} 0' in text
    assert "vllm:kv_cache_usage_perc" in text
    assert 'vllm:cache_config_info{block_size="16",num_gpu_blocks="200"} 1' in text


async def test_with_keys_every_path_but_health_is_closed(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with (
        fake_mesh(shared_nats_server.url, model_folder, api_keys=f"me:{KEY}") as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        for path in ("/v1/models", "/metrics", "/version", "/nothing", "/health/x"):
            for headers in ({}, {"authorization": "Bearer " + "x" * 20}, {"authorization": KEY}):
                answer = await http.get(path, headers=headers)
                assert answer.status_code == 401
                assert error_of(answer)["code"] == "invalid_api_key"
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await http.get(path)).status_code in (200, 503)
        keyed = {"authorization": f"Bearer {KEY}"}
        assert (await http.get("/v1/models", headers=keyed)).status_code == 200


async def test_an_error_before_the_first_token_is_a_plain_error(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    mesh.worker.refusal = NoCapacity("500 pages exceed the pool of 200")
    answer = await http.post(TEXT, json={"model": MODEL, "prompt": "x", "stream": True})
    assert answer.status_code == 400
    assert "pool of 200" in str(error_of(answer)["message"])


async def test_an_error_mid_stream_is_an_event_and_then_the_end(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    limits = RequestLimits(failures_max=0)
    async with (
        fake_mesh(shared_nats_server.url, model_folder, limits=limits) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        mesh.worker.pause_s = 0.01
        body = {"model": MODEL, "prompt": "abc", "stream": True, "max_tokens": 1_000}
        lines: list[str] = []
        async with http.stream("POST", TEXT, json=body) as answer:
            async for line in answer.aiter_lines():
                if line and not lines:
                    mesh.worker.stop_all()
                    lost = Worker(mesh.worker.name, mesh.worker.incarnation)
                    for life in list(mesh.front.gateway._lives.values()):
                        life.feed(ev.WorkerLost(lost))
                lines += [line] if line else []
    assert "error" in json.loads(lines[-1].removeprefix("data: "))
    assert "data: [DONE]" not in lines


async def test_too_many_requests_at_once_are_429(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with (
        fake_mesh(shared_nats_server.url, model_folder, request_count_max=1) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        mesh.worker.pause_s = 0.02
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 50}
        first = asyncio.create_task(http.post(TEXT, json=body))
        await eventually(lambda: mesh.front.gateway.in_flight_count == 1)
        second = await http.post(TEXT, json=body)
        assert second.status_code == 429
        assert second.headers["retry-after"] == "1"
        assert (await first).status_code == 200


async def test_the_same_idempotency_key_generates_once(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    body = {"model": MODEL, "prompt": "abc"}
    headers = {"Idempotency-Key": "mine"}
    first = await http.post(TEXT, json=body, headers=headers)
    again = await http.post(TEXT, json=body, headers=headers)
    assert first.content == again.content
    assert again.headers["idempotent-replayed"] == "true"
    assert len(mesh.worker.submits) == 1
    other = await http.post(TEXT, json=body | {"n": 2}, headers=headers)
    assert other.status_code == 400


async def test_a_failed_request_frees_its_idempotency_key(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    body = {"model": MODEL, "prompt": "abc"}
    headers = {"Idempotency-Key": "mine"}
    mesh.worker.refusal = NoCapacity("never")
    assert (await http.post(TEXT, json=body, headers=headers)).status_code == 400
    mesh.worker.refusal = None
    assert (await http.post(TEXT, json=body, headers=headers)).status_code == 200


async def test_a_slow_reader_is_cancelled_and_others_are_served(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    mesh.worker.step_tokens = 1
    host, port = mesh.url.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": MODEL, "prompt": "abc", "stream": True, "max_tokens": 3_100, "n": 60}
    ).encode()
    reader, writer = await asyncio.open_connection(host, int(port), limit=1_024)
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await eventually(lambda: any(a.reason == "client" for a in mesh.worker.aborts), within_s=60)
    answer = await http.post(TEXT, json={"model": MODEL, "prompt": "ok", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == "ko"
    writer.close()
    del reader


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health/live HTTP/1.1\r\nhost: x\r\nx: " + b"a" * HEAD_BYTES_MAX,
        b"GET /health/live HTTP/1.1\r\nhost: x\r\n" + b"x: aaaaaaaa\r\n" * (HEAD_BYTES_MAX // 10),
        b"GET /" + b"a" * HEAD_BYTES_MAX,
    ],
    ids=("value", "fields", "path"),
)
async def test_a_head_without_end_is_hung_up_on(mesh: FakeMesh, sent: bytes) -> None:
    reader, writer = await connect(mesh)
    writer.write(sent)
    async with asyncio.timeout(5):
        assert (await reader.read()).startswith(b"HTTP/1.1 4")
    writer.close()


async def test_trailers_without_end_are_hung_up_on(mesh: FakeMesh) -> None:
    _, writer = await connect(mesh)
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(5):
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"x: aaaaaaaa\r\n" * 1_000)
                await writer.drain()
                await asyncio.sleep(0.001)


async def test_a_head_that_does_not_come_is_not_waited_for(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S_MAX", 0.2)
    silent, silent_writer = await connect(mesh)
    slow, slow_writer = await connect(mesh)
    live = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
    slow_writer.write(live)
    async with asyncio.timeout(5):
        assert (await slow.readline()).startswith(b"HTTP/1.1 200")
        slow_writer.write(b"GET /health")
        assert b"HTTP/1.1" not in await slow.read()
        assert await silent.read() == b""
    for writer in (silent_writer, slow_writer):
        writer.close()


async def test_the_time_of_a_head_is_not_that_of_an_answer(
    mesh: FakeMesh, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_S_MAX", 0.2)
    mesh.worker.pause_s = 0.05
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 10}
    for _ in range(2):
        assert (await http.post(TEXT, json=body)).status_code == 200
        await asyncio.sleep(0.3)


async def test_a_body_beyond_what_may_be_answered_is_not_read(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with fake_mesh(shared_nats_server.url, model_folder, request_count_max=1) as mesh:
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode()
        _, first = await connect(mesh)
        first.write(head)
        await eventually(lambda: mesh.front._call_count == 1)
        reader, second = await connect(mesh)
        second.write(head)
        assert (await reader.readline()).startswith(b"HTTP/1.1 429")
        for writer in (first, second):
            writer.close()
        await eventually(lambda: mesh.front._call_count == 0)


async def connect(mesh: FakeMesh) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = mesh.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_an_address_that_cannot_be_had_is_one_line_that_names_it(mesh: FakeMesh) -> None:
    port = int(mesh.url.rpartition(":")[2])
    for host in ("127.0.0.1", "a..b"):
        door = HttpDoor(mesh.front, GatewayConfig(http_host=host, http_port=port))
        with pytest.raises(ConfigError, match=rf"{host}:{port}.*PAGEMESH_HTTP_PORT"):
            async with door.serve():
                raise AssertionError("served there")


async def test_nothing_of_a_prompt_is_in_an_error(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.worker.refusal = Busy("queue of secret-worker-name is full")
    mesh.front._limits = RequestLimits(failures_max=0)
    answer = await http.post(TEXT, json={"model": MODEL, "prompt": "my secret words"})
    assert answer.status_code == 503
    assert "secret" not in answer.text
