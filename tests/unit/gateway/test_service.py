"""The gateway as a service: its settings are heeded, and it says when it stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from nats.errors import NoRespondersError
from tests.unit.gateway.fake_mesh import FakeWorker
from tests.unit.gateway.support import MODEL, eventually

from pagemesh.gateway import service
from pagemesh.gateway.doors.front import Front
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.ids import new_incarnation
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.ports import free_port
from pagemesh.runtime.service import Stop
from pagemesh.runtime.service_config import ServiceConfig, load_service_config
from pagemesh.wire import codec, subjects
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.presence import Announce

TEXT = "/v1/completions"
KEY = "k" * 20
SETTINGS = {
    "PAGEMESH_REQUEST_TIMEOUT_MS": "400",
    "PAGEMESH_REQUEST_COUNT_MAX": "2",
    "PAGEMESH_BODY_BYTES_MAX": "2000",
    "PAGEMESH_API_KEYS": f"alice:{KEY}",
    "PAGEMESH_TENANT_LIMITS": "alice:pages=10%",
    "PAGEMESH_DISAGGREGATE": "always",
    "PAGEMESH_VLLM_METRICS": "true",
    "PAGEMESH_TRACE_RATIO": "0.25",
    "PAGEMESH_OTLP": "http://127.0.0.1:1",
}


class Running:
    """``service.run`` beside a worker."""

    def __init__(self, http: httpx.AsyncClient, stop: Stop, task: asyncio.Task[None]) -> None:
        self.http, self.stop, self.task = http, stop, task
        self.worker: FakeWorker
        self.front: Front
        self.config: ServiceConfig
        self.states: list[str] = []
        """What the gateway announced itself as."""

    async def status(self, **body: Any) -> int:
        answer = await self.http.post(TEXT, json={"prompt": "abc", "max_tokens": 1} | body)
        return answer.status_code


@pytest.fixture
async def running(
    shared_nats_server: NatsServer, model_folder: Path, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    name, port = f"g-{new_incarnation():x}", free_port()
    config = load_service_config(SETTINGS | {
        "PAGEMESH_NATS": shared_nats_server.url, "PAGEMESH_MODEL": str(model_folder),
        "PAGEMESH_MODEL_NAME": MODEL,
        "PAGEMESH_SECRET": "0123456789abcdef" * 2, "PAGEMESH_NAME": name,
        "PAGEMESH_HTTP_PORT": str(port),
    })  # fmt: skip
    monkeypatch.setattr(service, "spare_loaded", lambda: None)
    fronts: list[Front] = []

    class Kept(Front):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            fronts.append(self)

    monkeypatch.setattr(service, "Front", Kept)
    stop = Stop()
    headers = {"authorization": f"Bearer {KEY}"}
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, headers=headers)
        )
        made = Running(http, stop, asyncio.create_task(service.run(config, stop)))
        made.config = config

        def hear(delivery: Delivery) -> None:
            said = codec.decode_as(delivery.data, Announce)
            if said.name == name and said.state not in made.states[-1:]:
                made.states.append(said.state)

        try:
            await bus.subscribe(subjects.PRESENCE, hear)
            made.worker = await stack.enter_async_context(
                FakeWorker(bus, f"w-{name}", "decode").running()
            )
            await eventually(lambda: bool(fronts) and not fronts[0].gateway.unready_why)
            made.front = fronts[0]
            yield made
        finally:
            stop.request()
            await asyncio.wait([made.task], timeout=10)
            made.task.cancel()
            await asyncio.wait([made.task], timeout=10)


async def test_settings_are_heeded(running: Running) -> None:
    assert await running.status() == 200
    assert await running.status(prompt=["a", "b", "c"]) == 400
    assert await running.status(prompt="x" * 2_000) == 413
    assert await running.status(prompt=[65] * 300, max_tokens=21) == 400, "its tenant's quota"
    running.worker.pause_s = 0.05
    assert await running.status(max_tokens=100) == 504
    assert "vllm:" in (await running.http.get("/metrics")).text
    keyless = await running.http.get("/version", headers={"authorization": ""})
    assert keyless.status_code == 401
    assert running.front.gateway.router.limits.always_prefill
    assert running.front._trace_ratio == 0.25


async def test_a_gateway_that_is_to_stop_says_so_and_takes_no_more_from_the_bus(
    running: Running, shared_nats_server: NatsServer
) -> None:
    running.worker.pause_s = 0.05
    last = asyncio.create_task(running.status(max_tokens=7))
    await eventually(lambda: running.front.gateway.in_flight_count == 1)
    running.stop.request()
    await eventually(lambda: "draining" in running.states)
    async with await nats.connect(shared_nats_server.url) as client:
        with pytest.raises(NoRespondersError):
            await client.request(subjects.COMPLETIONS, b'{"prompt": "a"}', timeout=5)
    assert await last == 200
    await running.task
    await eventually(lambda: running.states == ["starting", "ready", "draining", "leaving"])


async def test_a_second_gateway_of_a_name_ends_and_leaves_the_first_alone(running: Running) -> None:
    running.worker.pause_s = 0.05
    answer = asyncio.create_task(running.status(max_tokens=7))
    await eventually(lambda: running.front.gateway.in_flight_count == 1)
    gate = replace(running.config.gateway, http_port=free_port())
    name = running.config.host.name
    with pytest.raises(ConfigError, match=rf"^gateway {name} of host .* already; .*\(--name\)$"):
        await service.run(replace(running.config, gateway=gate), Stop())
    assert await answer == 200
    assert running.states == ["starting", "ready"]
