"""What a tenant's limits do at the gateway: requests at once, and what goes along to the pager."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from tests.unit.gateway.fake_mesh import FakeMesh, fake_mesh
from tests.unit.gateway.support import MODEL, eventually

from pagemesh.runtime.nats_server import NatsServer
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
