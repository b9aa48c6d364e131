"""What a tenant's limits do at the gateway: requests at once, and what goes along to the pager."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from tests.unit.gateway.fake_mesh import FakeMesh, fake_mesh
from tests.unit.gateway.support import MODEL, eventually

from pagemesh.runtime.nats_server import NatsServer
from pagemesh.wire import subjects
from pagemesh.wire.cache_terms import CacheTerms

TEXT = "/v1/completions"
ALICE = {"authorization": "Bearer " + "a" * 20}
BOB = {"authorization": "Bearer " + "b" * 20}
KEYS = f"alice:{'a' * 20},bob:{'b' * 20}"


@asynccontextmanager
async def limited(
    server: NatsServer, model: Path, limits: str, *, request_count_max: int = 64
) -> AsyncIterator[tuple[FakeMesh, httpx.AsyncClient]]:
    made = fake_mesh(
        server.url, model, api_keys=KEYS, tenant_limits=limits, request_count_max=request_count_max
    )
    async with made as mesh, httpx.AsyncClient(base_url=mesh.url) as http:
        yield mesh, http


async def test_a_tenant_with_enough_requests_is_told_its_limit_and_others_go_on(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with limited(shared_nats_server, model_folder, "alice:requests=1") as (mesh, http):
        mesh.worker.pause_s = 0.02
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 50}
        first = asyncio.create_task(http.post(TEXT, json=body, headers=ALICE))
        await eventually(lambda: mesh.front.gateway.in_flight_count == 1)
        second = await http.post(TEXT, json=body, headers=ALICE)
        assert second.status_code == 429 and second.headers["retry-after"] == "1"
        error = second.json()["error"]
        assert error["code"] == "quota_exceeded" and "limit of 1 open" in error["message"]
        assert (await http.post(TEXT, json=body, headers=BOB)).status_code == 200
        assert (await first).status_code == 200
        assert (await http.post(TEXT, json=body, headers=ALICE)).status_code == 200


Post = Callable[..., Coroutine[Any, Any, int]]


@asynccontextmanager
async def door(kind: str, server: NatsServer, http: httpx.AsyncClient) -> AsyncIterator[Post]:
    """Asks for a completion there, and gives the status of the answer."""
    body: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 1}
    client = await nats.connect(server.url)

    async def post(headers: dict[str, str], **more: Any) -> int:
        if kind == "http":
            return (await http.post(TEXT, json=body | more, headers=headers)).status_code
        asked = json.dumps(body | more).encode()
        reply = await client.request(subjects.COMPLETIONS, asked, timeout=10, headers=headers)
        return int((reply.headers or {}).get("nats-service-error-code", "200"))

    try:
        yield post
    finally:
        await client.close()


@pytest.mark.parametrize("kind", ["http", "bus"])
async def test_a_call_counts_to_its_own_tenant_alone(
    shared_nats_server: NatsServer, model_folder: Path, kind: str
) -> None:
    limits = "alice:pages=10% requests=1"
    async with (
        limited(shared_nats_server, model_folder, limits) as (mesh, http),
        door(kind, shared_nats_server, http) as post,
    ):
        mesh.worker.pause_s = 0.02
        for runs in (BOB, ALICE):
            running = asyncio.create_task(post(runs, max_tokens=60))
            await eventually(lambda: mesh.front.gateway.in_flight_count == 1)
            assert await post(ALICE) == (429 if runs is ALICE else 200)
            assert await post(BOB) == await running == 200
        more_than_alices: dict[str, Any] = {"prompt": [65] * 320}
        assert [await post(whose, **more_than_alices) for whose in (ALICE, BOB)] == [400, 200]
        assert {submit.terms.tenant for submit in mesh.worker.submits} == {"alice", "bob"}
        assert all(
            (submit.terms.pool_share == 0.1) == (submit.terms.tenant == "alice")
            for submit in mesh.worker.submits
        )


@pytest.mark.parametrize("path", [TEXT, "/tokenize", "/detokenize"])
async def test_bodies_that_are_long_in_coming_count_and_leave_room_for_other_tenants(
    shared_nats_server: NatsServer, model_folder: Path, path: str
) -> None:
    """One tenant's took the places of everybody."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: {ALICE['authorization']}\r\n"
    around = limited(shared_nats_server, model_folder, "alice:requests=1", request_count_max=2)
    async with around as (mesh, http):
        url, answers = httpx.URL(mesh.url), []
        for _ in range(3):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(f"{head}content-length: 100\r\n\r\n{{".encode())
            answers.append((reader, writer))
            await eventually(lambda: mesh.front._calls_of["alice"] == 1)
        for reader, writer in answers[1:]:
            assert (await reader.readline()).startswith(b"HTTP/1.1 429")
            writer.close()
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 2}
        assert (await http.post(TEXT, json=body, headers=BOB)).status_code == 200
        answers[0][1].close()
        await eventually(lambda: not mesh.front._calls_of)


async def test_tenant_quota_and_time_to_live_go_with_the_request(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    limits = "alice:pages=25% disk_pages=50% cache_ttl_s=60"
    async with limited(shared_nats_server, model_folder, limits) as (mesh, http):
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 2}
        for headers, ttl_s in ((ALICE, None), (ALICE, 10), (BOB, 10)):
            asked = await http.post(TEXT, json={**body, "cache_ttl_s": ttl_s}, headers=headers)
            assert asked.status_code == 200
        assert [submit.terms for submit in mesh.worker.submits] == [
            CacheTerms(tenant="alice", pool_share=0.25, disk_share=0.5, ttl_s=60),
            CacheTerms(tenant="alice", pool_share=0.25, disk_share=0.5, ttl_s=10),
            CacheTerms(tenant="bob", ttl_s=10),
        ]
