"""What a tenant's limits do at the gateway: requests at once, and what goes along to the pager."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
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
    server: NatsServer, model: Path, limits: str
) -> AsyncIterator[tuple[FakeMesh, httpx.AsyncClient]]:
    async with (
        fake_mesh(server.url, model, api_keys=KEYS, tenant_limits=limits) as mesh,
        httpx.AsyncClient(base_url=mesh.url) as http,
    ):
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
