"""Whether a gateway would serve a request, as metrics have it at each scrape."""

from __future__ import annotations

from pathlib import Path

import httpx
from tests.unit.gateway.fake_mesh import fake_mesh
from tests.unit.gateway.support import eventually

from pagemesh.runtime.metrics import REGISTRY
from pagemesh.runtime.nats_server import NatsServer


def measured() -> float | None:
    return REGISTRY.get_sample_value("pagemesh_gateway_ready")


async def test_a_gateway_counts_as_ready_while_it_would_serve(
    nats_server: NatsServer, model_folder: Path
) -> None:
    async with fake_mesh(nats_server.url, model_folder) as mesh:
        gateway = mesh.front.gateway
        await eventually(lambda: not gateway.unready_why)
        assert measured() == 1
        gateway.announce("draining")
        assert measured() == 0
        gateway.announce("ready")
        nats_server.kill()
        await eventually(lambda: gateway.unready_why == "the bus is away")
        assert measured() == 0
        nats_server.start()
        await eventually(lambda: not gateway.unready_why)
        assert measured() == 1
    assert measured() == 0


async def test_a_gateway_without_workers_does_not(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with fake_mesh(shared_nats_server.url, model_folder, roles=()) as mesh:
        assert mesh.front.gateway.unready_why == "no worker is ready"
        assert measured() == 0


async def test_a_gateway_whose_bus_carries_nothing_does_not_and_says_why(
    tmp_path: Path, model_folder: Path
) -> None:
    with NatsServer(tmp_path / "narrow", message_bytes_max=8_192) as server:
        async with fake_mesh(server.url, model_folder) as mesh:
            gateway = mesh.front.gateway
            await eventually(lambda: gateway.known_facts is not None)
            assert "max_payload of 8192 bytes is too small" in gateway.unready_why
            assert measured() == 0
            async with httpx.AsyncClient(base_url=mesh.url) as http:
                body = {"prompt": "abc", "max_tokens": 1}
                answer = await http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["message"] == gateway.unready_why
