"""Streams as they go over HTTP, what becomes of their idempotency keys, and the model list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.gateway.fake_mesh import FACTS, FakeMesh, fake_mesh
from tests.unit.gateway.support import MODEL, eventually

from pagemesh.gateway.calls.spec import RequestLimits
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.wire.errors import NoCapacity
from pagemesh.wire.presence import Role

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
KEY = {"idempotency-key": "mine"}
BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 3}
STREAM = BODY | {"stream": True}


@pytest.fixture
async def http(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "asked"),
    [(CHAT, {"messages": [{"role": "user", "content": "abc"}]}), (TEXT, {"prompt": "abc"})],
)
async def test_a_stream_is_events_that_nobody_on_the_way_keeps_and_says_when_it_is_done(
    http: httpx.AsyncClient, path: str, asked: dict[str, Any]
) -> None:
    answer = await http.post(path, json=asked | {"max_tokens": 3, "stream": True})
    headers = ("content-type", "cache-control", "x-accel-buffering", "content-length")
    assert [answer.headers.get(name) for name in headers] == [
        "text/event-stream; charset=utf-8", "no-cache", "no", None,
    ]  # fmt: skip
    *chunks, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(json.loads(chunk.removeprefix("data: "))["choices"] for chunk in chunks)


async def test_the_key_of_a_stream_is_in_use_while_it_runs_and_used_when_it_has_ended(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    mesh.worker.pause_s = 0.05
    first = asyncio.create_task(http.post(TEXT, json=STREAM | {"max_tokens": 20}, headers=KEY))
    await eventually(lambda: mesh.front.gateway.in_flight_count == 1)
    again = await http.post(TEXT, json=STREAM | {"max_tokens": 20}, headers=KEY)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "idempotency_key_in_use")
    assert (await first).text.endswith("data: [DONE]\n\n")
    again = await http.post(TEXT, json=STREAM | {"max_tokens": 20}, headers=KEY)
    assert (again.status_code, again.json()["error"]["code"]) == (400, "idempotency_key_used")
    assert "as a stream" in again.text and len(mesh.worker.submits) == 1


@pytest.mark.parametrize("how", ["refused", "fails", "left"])
async def test_the_key_of_a_stream_that_was_not_given_to_its_end_is_free_again(
    mesh: FakeMesh, http: httpx.AsyncClient, how: str
) -> None:
    mesh.front._limits = RequestLimits(failures_max=0)
    mesh.worker.pause_s = 0.02
    if how == "refused":
        mesh.worker.refusal = NoCapacity("never")
    async with http.stream("POST", TEXT, json=STREAM | {"max_tokens": 200}, headers=KEY) as answer:
        lines = answer.aiter_lines()
        first = await anext(lines)
        assert ("error" in first) == (how == "refused")
        if how == "fails":
            mesh.front.gateway.cut_off()
            assert "stopped" in [line async for line in lines if line][-1]
    await eventually(lambda: not mesh.front._call_count)
    mesh.worker.refusal, mesh.worker.pause_s = None, 0.0
    again = await http.post(TEXT, json=STREAM | {"max_tokens": 200}, headers=KEY)
    assert again.status_code == 200


async def test_a_key_of_one_path_is_used_for_another(http: httpx.AsyncClient) -> None:
    assert (await http.post(TEXT, json=BODY, headers=KEY)).status_code == 200
    other = await http.post(CHAT, json=BODY, headers=KEY)
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_used")


@pytest.mark.parametrize(
    ("roles", "told"),
    [(("decode",), {"max_model_len": FACTS.pool_pages * FACTS.page_size}), ((), {})],
)
async def test_a_model_is_listed_with_its_length_where_somebody_serves_it(
    shared_nats_server: NatsServer, model_folder: Path, roles: tuple[Role, ...],
    told: dict[str, int],
) -> None:  # fmt: skip
    async with (
        fake_mesh(shared_nats_server.url, model_folder, roles=roles) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
        await eventually(lambda: bool(mesh.front.gateway.router.models()) == bool(roles))
        (line,) = (await http.get("/v1/models")).json()["data"]
        assert line == {
            "id": MODEL, "object": "model", "created": mesh.front.created, "owned_by": "pagemesh",
        } | told  # fmt: skip
        assert (await http.get(f"/v1/models/{MODEL}")).json() == line
