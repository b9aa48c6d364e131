"""Gateways of two models at one NATS server: each answers for its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.unit.gateway.fake_mesh import fake_mesh
from tests.unit.gateway.support import MODEL
from tests.unit.gateway.test_bus_door import stream

from pagemesh.gateway.doors import bus_door
from pagemesh.runtime.metrics import REGISTRY
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.wire import subjects

OTHER = "other model, with blanks.and.dots"
CALLS = 12
"""As many as show that either gateway gets some."""


@pytest.fixture
async def client(shared_nats_server: NatsServer) -> AsyncIterator[Client]:
    made = await nats.connect(shared_nats_server.url)
    yield made
    await made.close()


async def ask(client: Client, model: str) -> Msg:
    body = json.dumps({"model": model, "prompt": "abc", "max_tokens": 3}).encode()
    return await client.request(subjects.COMPLETIONS, body, timeout=5)


def ended_count(outcome: str) -> float:
    labels = {"door": "bus", "endpoint": "text_completion", "outcome": outcome}
    return REGISTRY.get_sample_value("pagemesh_gateway_requests_total", labels) or 0.0


async def test_a_call_is_answered_by_a_gateway_of_its_model_whoever_gets_it(
    shared_nats_server: NatsServer, model_folder: Path, client: Client
) -> None:
    url = shared_nats_server.url
    async with (
        fake_mesh(url, model_folder) as ours,
        fake_mesh(url, model_folder, model=OTHER) as its,
    ):
        refused = ended_count("refused")
        for model, mesh in ((MODEL, ours), (OTHER, its)):
            for _ in range(CALLS):
                reply = await ask(client, model)
                assert json.loads(reply.data)["choices"][0]["text"] == "cba"
                assert reply.headers == {"pagemesh-sequence": "1", "pagemesh-last": "true"}
                chat = {"model": model, "messages": [{"role": "user", "content": "x"}]}
                asked: dict[str, object] = {**chat, "max_tokens": 2, "stream": True}
                *chunks, last = await stream(client, subjects.CHAT_COMPLETIONS, asked)
                assert chunks and last.data == b""
            assert len(mesh.worker.submits) == 2 * CALLS
        assert ended_count("refused") == refused, "handing a call on refuses nothing"


async def test_a_model_that_nobody_serves_is_not_found_and_one_that_is_full_says_so(
    shared_nats_server: NatsServer,
    model_folder: Path,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = shared_nats_server.url
    async with (
        fake_mesh(url, model_folder) as ours,
        fake_mesh(url, model_folder, model=OTHER) as its,
    ):
        for _ in range(CALLS):
            assert json.loads((await ask(client, "none")).data)["error"]["code"] == (
                "model_not_found"
            )
        for subscription in its.bus_door._subscriptions[:-1]:
            await its.bus.unsubscribe(subscription)
        monkeypatch.setattr(bus_door, "CALLS_MAX", 1)
        reply = await ask(client, OTHER)
        assert "error" not in json.loads(reply.data), "one call at each gateway"
        monkeypatch.setattr(its.bus_door, "_calls", {1, 2})
        error = json.loads((await ask(client, OTHER)).data)["error"]
        assert error["code"] == "overloaded"
        monkeypatch.undo()
        await its.bus_door.close()
        assert json.loads((await ask(client, OTHER)).data)["error"]["code"] == "model_not_found"
        assert not ours.worker.submits


async def test_a_call_that_cannot_be_handed_on_is_the_clients_fault(
    shared_nats_server: NatsServer, model_folder: Path, client: Client
) -> None:
    async with fake_mesh(shared_nats_server.url, model_folder):
        body = {"model": "other", "prompt": "abc"}
        data = json.dumps(body).encode()
        inbox, head = client.new_inbox(), b"NATS/1.0\r\nx(y): no token\r\n\r\n"
        replies = await client.subscribe(inbox)
        sizes = len(head), len(head) + len(data)
        odd = b"HPUB %b %b %d %d\r\n" % (subjects.COMPLETIONS.encode(), inbox.encode(), *sizes)
        await client._send_command(odd + head + data + b"\r\n")  # nats-py sends no such header
        told = await replies.next_msg(timeout=5)
        assert json.loads(told.data)["error"]["code"] == "model_not_found"
        large = json.dumps({**body, "user": ""}).encode()
        large = large[:-2] + b"x" * (client.max_payload - len(large)) + large[-2:]
        told = await client.request(subjects.COMPLETIONS, large, timeout=5)
        error = json.loads(told.data)["error"]
        assert (error["code"], error["type"]) == ("body_too_large", "invalid_request_error")
