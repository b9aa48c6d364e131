"""Pages of other origins: nothing for them unless asked for, and then errors too."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.unit.gateway.fake_mesh import FakeMesh, fake_mesh
from tests.unit.gateway.support import MODEL, eventually

from pagemesh.gateway.doors.asgi import Guard
from pagemesh.gateway.doors.http import HttpDoor
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.settings import GatewayConfig

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
KEY = "k" * 20
PAGE = "https://chat.example.com"
ALLOWED = "access-control-allow-origin"


@contextlib.asynccontextmanager
async def gateway(
    server: NatsServer, model: Path, *origins: str, request_count_max: int = 64
) -> AsyncIterator[tuple[FakeMesh, httpx.AsyncClient]]:
    """One that asks for a key and lets pages of ``origins`` in."""
    config = GatewayConfig(http_port=0, cors_origins=origins)
    async with (
        fake_mesh(
            server.url, model, api_keys=f"me:{KEY}", config=config,
            request_count_max=request_count_max,
        ) as mesh,
        httpx.AsyncClient(base_url=mesh.url, timeout=10, headers={"origin": PAGE}) as http,
    ):  # fmt: skip
        yield mesh, http


def preflight(*headers: str, method: str = "POST") -> dict[str, str]:
    """What a browser asks before a request with ``headers``; a key is never among it."""
    return {
        "access-control-request-method": method,
        "access-control-request-headers": ",".join(headers),
    }


async def test_unless_asked_for_there_is_nothing_for_pages(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with gateway(shared_nats_server, model_folder) as (_, http):
        keyed = {"authorization": f"Bearer {KEY}"}
        answers = [
            await http.get("/v1/models", headers=keyed),
            await http.options(CHAT, headers=preflight("authorization")),
            await http.get("/health/live"),
        ]
    assert [answer.status_code for answer in answers] == [200, 401, 200]
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert "vary" not in answer.headers


async def test_unless_asked_for_nothing_stands_before_the_guard(mesh: FakeMesh) -> None:
    assert isinstance(HttpDoor(mesh.front, GatewayConfig()).app, Guard)


@pytest.mark.parametrize("origins", [(PAGE, "http://localhost:3000"), ("*",)])
async def test_a_preflight_needs_no_key_and_allows_what_sdks_send(
    shared_nats_server: NatsServer, model_folder: Path, origins: tuple[str, ...]
) -> None:
    sent = ("authorization", "content-type", "idempotency-key", "traceparent", "x-stainless-os")
    async with gateway(shared_nats_server, model_folder, *origins) as (_, http):
        for path in (CHAT, TEXT, "/tokenize"):
            answer = await http.options(path, headers=preflight(*sent))
            assert answer.status_code == 200
            assert answer.headers[ALLOWED] == (PAGE if PAGE in origins else "*")
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert answer.headers["access-control-allow-headers"] == ",".join(sent)
            assert "access-control-allow-credentials" not in answer.headers
        assert (await http.get("/v1/models")).status_code == 401, "what follows does need one"


async def test_a_page_of_a_named_origin_alone_may_look_into_a_private_network(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    asks = preflight() | {"access-control-request-private-network": "true"}
    for origins, status in (((PAGE,), 200), (("*",), 400)):
        async with gateway(shared_nats_server, model_folder, *origins) as (_, http):
            answer = await http.options(CHAT, headers=asks)
            allowed = answer.headers.get("access-control-allow-private-network")
            assert (answer.status_code, allowed == "true") == (status, status == 200)


async def test_a_page_of_another_origin_is_shown_nothing(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with gateway(shared_nats_server, model_folder, PAGE) as (_, http):
        for origin in ("https://chat.example.com.evil", "http://chat.example.com", "null"):
            http.headers["origin"] = origin
            asked = await http.options(CHAT, headers=preflight())
            assert asked.status_code == 400 and ALLOWED not in asked.headers
            answer = await http.get("/health/live")
            assert answer.status_code == 200 and ALLOWED not in answer.headers
            assert answer.headers["vary"] == "Origin", "a cache must not give it to other pages"


async def test_every_error_can_be_read_by_the_page_and_says_when_to_ask_again(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 50}
    async with gateway(shared_nats_server, model_folder, PAGE, request_count_max=1) as (mesh, http):
        answers = {401: await http.post(TEXT, json=body)}
        http.headers["authorization"] = f"Bearer {KEY}"
        answers[400] = await http.post(TEXT, content=b"{")
        answers[404] = await http.get("/v1/nothing")
        answers[405] = await http.get(TEXT)
        mesh.worker.pause_s = 0.02
        first = asyncio.create_task(http.post(TEXT, json=body))
        await eventually(lambda: mesh.front.gateway.in_flight_count == 1)
        answers[429] = await http.post(TEXT, json=body)
        answers[200] = await first
    for status, answer in answers.items():
        assert answer.status_code == status
        assert answer.headers[ALLOWED] == PAGE
        shown = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert {"x-request-id", "retry-after", "idempotent-replayed"} == set(shown)
        assert answer.headers["x-request-id"]
    assert answers[429].headers["retry-after"] == "1"


async def test_a_stream_is_for_the_page_too_and_comes_piece_by_piece(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with gateway(shared_nats_server, model_folder, PAGE) as (mesh, http):
        http.headers["authorization"] = f"Bearer {KEY}"
        mesh.worker.pause_s = 0.02
        body = {"prompt": "abcdef", "max_tokens": 6, "stream": True}
        async with http.stream("POST", TEXT, json=body) as answer:
            assert answer.headers[ALLOWED] == PAGE
            pieces = [piece async for piece in answer.aiter_raw()]
    assert len(pieces) > 3 and pieces[-1].endswith(b"data: [DONE]\n\n")
