"""The bus door as any NATS client sees it: requests, streams, errors, discovery."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError
from tests.unit.gateway.fake_mesh import FakeMesh, fake_mesh
from tests.unit.gateway.support import MODEL, eventually

from pagemesh.gateway.calls import call_facts
from pagemesh.gateway.doors import bus_door
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.wire import subjects

KEY = "k" * 20


@pytest.fixture
async def client(shared_nats_server: NatsServer) -> AsyncIterator[Client]:
    made = await nats.connect(shared_nats_server.url)
    yield made
    await made.close()


async def stream(client: Client, subject: str, body: dict[str, object]) -> list[Msg]:
    """Every message of an answer, the last one included."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    await client.publish(subject, json.dumps(body).encode(), reply=inbox)
    found: list[Msg] = []
    while not found or (found[-1].headers or {}).get("pagemesh-last") != "true":
        found.append(await subscription.next_msg(timeout=5))
    await subscription.unsubscribe()
    return found


async def test_a_completion_is_one_reply(mesh: FakeMesh, client: Client) -> None:
    body = json.dumps({"model": MODEL, "prompt": "abc", "max_tokens": 3}).encode()
    reply = await client.request(subjects.COMPLETIONS, body, timeout=5)
    assert json.loads(reply.data)["choices"][0]["text"] == "cba"
    assert reply.headers == {"pagemesh-sequence": "1", "pagemesh-last": "true"}


async def test_who_came_first_is_told_as_gateways_of_other_hosts_tell_it(
    mesh: FakeMesh, client: Client
) -> None:
    """Not by a clock that began when this host was started."""
    body = json.dumps({"model": MODEL, "prompt": "abc", "max_tokens": 3}).encode()
    before_us = time.time_ns() // 1_000
    await client.request(subjects.COMPLETIONS, body, timeout=5)
    [submit] = mesh.worker.submits
    assert before_us <= submit.arrival_us + 1_000 and submit.arrival_us <= time.time_ns() // 1_000


async def test_a_chat_stream_is_numbered_chunks_and_an_empty_last_message(
    mesh: FakeMesh, client: Client
) -> None:
    messages = await stream(
        client,
        subjects.CHAT_COMPLETIONS,
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 5,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    numbers = [int((message.headers or {})["pagemesh-sequence"]) for message in messages]
    assert numbers == list(range(1, len(messages) + 1))
    assert messages[-1].data == b""
    chunks = [json.loads(message.data) for message in messages[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["usage"]["completion_tokens"] == 5


async def test_a_call_is_part_of_its_callers_trace(
    mesh: FakeMesh, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[int] = []
    monkeypatch.setattr(
        call_facts, "record_span", lambda _, context, **__: traces.append(context.trace_id)
    )
    trace = "0123456789abcdef" * 2
    headers = {"traceparent": f"00-{trace}-0123456789abcdef-01"}
    body = json.dumps({"prompt": "abc", "max_tokens": 1}).encode()
    await client.request(subjects.COMPLETIONS, body, timeout=5, headers=headers)
    assert traces == [int(trace, 16)]


async def test_models_are_listed(mesh: FakeMesh, client: Client) -> None:
    reply = await client.request(subjects.MODELS, b"", timeout=5)
    assert [model["id"] for model in json.loads(reply.data)["data"]] == [MODEL]


async def test_an_error_is_openais_object_with_its_status_in_headers(
    mesh: FakeMesh, client: Client
) -> None:
    for body, status, param in (
        (b"\x80\x04pickle", "400", None),
        (b'{"model":"other","prompt":"x"}', "404", "model"),
        (b'{"model":"tiny","prompt":"x","n":0}', "400", "n"),
    ):
        reply = await client.request(subjects.COMPLETIONS, body, timeout=5)
        headers = reply.headers or {}
        assert headers["nats-service-error-code"] == status
        assert headers["pagemesh-last"] == "true" and headers["pagemesh-error"]
        assert json.loads(reply.data)["error"]["param"] == param


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        ({"model": "other"}, ["model_not_found", "404", "not_found_error"]),
        ({"n": "x"}, ["invalid_value", "400", "invalid_request_error"]),
        ({}, ["overloaded", "503", "overloaded_error"]),
    ],
    ids=("code", "body", "not taken"),
)
async def test_a_refusal_is_one_message_whose_headers_say_all(
    mesh: FakeMesh, client: Client, monkeypatch: pytest.MonkeyPatch,
    refused: dict[str, object], told: list[str],
) -> None:  # fmt: skip
    if not refused:
        monkeypatch.setattr(bus_door, "CALLS_MAX", 0)
    names = ("pagemesh-error", "nats-service-error-code", "nats-service-error")
    (reply,) = await stream(client, subjects.COMPLETIONS, {"prompt": "abc"} | refused)
    assert reply.headers == dict(zip(names, told, strict=True)) | {
        "pagemesh-sequence": "1", "pagemesh-last": "true",
    }  # fmt: skip


async def test_a_stream_that_fails_on_the_way_is_numbered_to_its_error(
    mesh: FakeMesh, client: Client
) -> None:
    mesh.worker.pause_s = 0.02
    body: dict[str, object] = {"prompt": "abc", "max_tokens": 200, "stream": True}
    asked = asyncio.create_task(stream(client, subjects.COMPLETIONS, body))
    await eventually(lambda: mesh.worker.counter > 3)
    mesh.front.gateway.cut_off()
    *chunks, last = [message.headers or {} for message in await asked]
    assert chunks == [{"pagemesh-sequence": f"{number + 1}"} for number in range(len(chunks))]
    assert (last["pagemesh-sequence"], last["pagemesh-last"]) == (f"{len(chunks) + 1}", "true")
    assert (last["pagemesh-error"], last["nats-service-error-code"]) == ("stopped", "503")


async def test_a_door_that_ends_takes_no_more_and_has_what_runs_answered(
    mesh: FakeMesh, client: Client
) -> None:
    await mesh.bus_door.close()
    mesh.worker.pause_s = 0.05
    body: dict[str, object] = {"prompt": "abc", "max_tokens": 20, "stream": True}

    async def last_one() -> list[Msg]:
        async with bus_door.BusDoor(mesh.front, mesh.bus).open():
            asked = asyncio.create_task(stream(client, subjects.COMPLETIONS, body))
            await eventually(lambda: mesh.worker.running_count == 1)
        assert not mesh.worker.running_count, "it was waited for"
        return await asked

    ending = asyncio.create_task(last_one())
    await eventually(lambda: mesh.worker.running_count == 1)
    with pytest.raises(NoRespondersError):
        while not ending.done():
            await client.request(subjects.MODELS, b"", timeout=5)
            await asyncio.sleep(0.02)
    last = (await ending)[-1]
    assert bus_door.ERROR not in (last.headers or {}) and mesh.worker.aborts == []


async def test_a_caller_whose_call_is_none_yet_is_told_that_the_gateway_was_stopped(
    shared_nats_server: NatsServer, model_folder: Path, client: Client
) -> None:
    async with fake_mesh(shared_nats_server.url, model_folder, roles=()) as mesh:
        body: dict[str, object] = {"prompt": "abc"}
        asked = asyncio.create_task(stream(client, subjects.COMPLETIONS, body))
        await eventually(lambda: bool(mesh.front._call_count))
        for call in tuple(mesh.bus_door._calls):
            call.cancel()
        (reply,) = await asked
        assert json.loads(reply.data)["error"]["code"] == "stopped"


async def test_with_keys_a_call_needs_one(
    shared_nats_server: NatsServer, model_folder: Path, client: Client
) -> None:
    async with fake_mesh(shared_nats_server.url, model_folder, api_keys=KEY):
        refused = await client.request(subjects.MODELS, b"", timeout=5)
        assert (refused.headers or {})["nats-service-error-code"] == "401"
        headers = {"authorization": f"Bearer {KEY}"}
        taken = await client.request(subjects.MODELS, b"", timeout=5, headers=headers)
        assert "nats-service-error-code" not in (taken.headers or {})


async def test_a_caller_that_leaves_is_noticed(mesh: FakeMesh, client: Client) -> None:
    mesh.worker.pause_s = 0.05
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 3_000, "stream": True}
    await client.publish(subjects.COMPLETIONS, json.dumps(body).encode(), reply=inbox)
    await subscription.next_msg(timeout=5)
    await subscription.unsubscribe()
    await eventually(lambda: any(a.reason == "client" for a in mesh.worker.aborts))
    await eventually(lambda: not mesh.front.gateway.in_flight_count)


async def test_nobody_waits_for_replies_any_more_once_a_stream_is_over(
    mesh: FakeMesh, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bus_door._Answer] = []

    class Kept(bus_door._Answer):
        """What is forgotten is ended by the garbage collector, some time."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            answers.append(self)

    monkeypatch.setattr(bus_door, "_Answer", Kept)
    monkeypatch.setattr(bus_door, "_PROBE_MS", 0)  # each message asks whether somebody listens
    mesh.worker.pause_s = 0.005
    await eventually(lambda: not mesh.front.gateway.unready_why)
    before = mesh.bus.statistics().requests_waiting
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 9, "stream": True}
    await client.publish(subjects.COMPLETIONS, json.dumps(body).encode(), reply=inbox)
    counts, is_last = [], False
    while not is_last:
        message = await subscription.next_msg(timeout=5)
        counts.append(mesh.bus.statistics().requests_waiting - before)
        is_last = (message.headers or {}).get(bus_door.LAST) == "true"
    assert len(counts) > 9 and max(counts) == 1, "one that asks whether somebody listens"
    await eventually(lambda: mesh.bus.statistics().requests_waiting == before)


async def test_a_message_that_wants_no_reply_costs_nothing(mesh: FakeMesh, client: Client) -> None:
    body = json.dumps({"model": MODEL, "prompt": "abc"}).encode()
    await client.publish(subjects.COMPLETIONS, body)
    await client.request(subjects.MODELS, b"", timeout=5)
    await asyncio.sleep(0.05)
    assert mesh.worker.submits == []


@pytest.mark.parametrize("reply", [subjects.worker("w"), subjects.worker("w").upper(), "a..b"])
async def test_nobody_speaks_to_a_service_through_the_door(
    mesh: FakeMesh, client: Client, reply: str
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "abc"}).encode()
    heard: list[Msg] = []

    async def hear(message: Msg) -> None:
        heard.append(message)

    await client.subscribe(">", cb=hear)
    for subject in (subjects.COMPLETIONS, subjects.MODELS):
        await client.publish(subject, body, reply=reply)
    for subject, asked in ((subjects.MODELS, b""), (subjects.COMPLETIONS, body)):
        await client.request(subject, asked, timeout=5)
    assert len(mesh.worker.submits) == 1, "that of the last one"
    assert not [message for message in heard if message.subject == reply]


async def test_a_call_that_is_not_taken_is_told_so_in_openais_form(
    mesh: FakeMesh, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_door, "CALLS_MAX", 0)
    (reply,) = await stream(client, subjects.COMPLETIONS, {"model": MODEL, "prompt": "abc"})
    assert json.loads(reply.data)["error"]["code"] == "overloaded"
    assert (reply.headers or {})["nats-service-error-code"] == "503"


async def test_too_many_calls_at_once_are_429(
    shared_nats_server: NatsServer, model_folder: Path, client: Client
) -> None:
    async with fake_mesh(shared_nats_server.url, model_folder, request_count_max=0):
        (reply,) = await stream(client, subjects.COMPLETIONS, {"model": MODEL, "prompt": "abc"})
        assert (reply.headers or {})["nats-service-error-code"] == "429"


async def test_nobody_has_an_answer_sent_to_a_service(mesh: FakeMesh, client: Client) -> None:
    """The gateway may speak to workers and clients may not: it is not lent to them."""
    body = json.dumps({"model": MODEL, "prompt": "abc"}).encode()
    inboxes = [subjects.inbox_prefix(role, "x") + ".1" for role in ("gateway", "pager", "decode")]
    for reply in (subjects.worker("w"), subjects.pager("p"), subjects.PRESENCE, *inboxes):
        await client.publish(subjects.COMPLETIONS, body, reply=reply)
    tenant = subjects.inbox_prefix("client", "tenant") + ".1"
    heard = await client.subscribe(tenant)
    await client.publish(subjects.COMPLETIONS, body, reply=tenant)
    await heard.next_msg(timeout=5)
    assert len(mesh.worker.submits) == 1


async def test_a_closed_door_leaves_calls_to_other_gateways(
    shared_nats_server: NatsServer, model_folder: Path, client: Client
) -> None:
    async with (
        fake_mesh(shared_nats_server.url, model_folder),
        fake_mesh(shared_nats_server.url, model_folder, roles=()) as leaves,
    ):
        leaves.front.model = "another"
        await leaves.bus_door.close()
        body: dict[str, object] = {"model": MODEL, "prompt": "abc", "max_tokens": 1}
        for _ in range(10):
            (reply,) = await stream(client, subjects.COMPLETIONS, body)
            assert "nats-service-error-code" not in (reply.headers or {})


async def test_the_service_is_discoverable_and_counts_its_calls(
    mesh: FakeMesh, client: Client
) -> None:
    await client.request(subjects.MODELS, b"", timeout=5)
    await client.request(subjects.COMPLETIONS, b"{", timeout=5)
    info = json.loads((await client.request("$SRV.INFO.pagemesh", b"", timeout=5)).data)
    assert {endpoint["subject"] for endpoint in info["endpoints"]} == {
        subjects.CHAT_COMPLETIONS,
        subjects.COMPLETIONS,
        subjects.MODELS,
    }
    stats = json.loads((await client.request("$SRV.STATS.pagemesh", b"", timeout=5)).data)
    counts = {e["name"]: (e["num_requests"], e["num_errors"]) for e in stats["endpoints"]}
    assert counts == {"chat": (0, 0), "completions": (1, 1), "models": (1, 0)}


async def test_an_answer_that_the_bus_cannot_carry_ends_as_soon_as_that_is_known(
    mesh: FakeMesh, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_door, "_HEADER_BYTES_MAX", mesh.bus.message_bytes_max - 2_000)
    mesh.worker.pause_s = 0.001
    body = {"prompt": "abc", "max_tokens": 3_000, "logprobs": 5}
    reply = await client.request(subjects.COMPLETIONS, json.dumps(body).encode(), timeout=5)
    error = json.loads(reply.data)["error"]
    assert error["code"] == "answer_too_large" and "exceeds 2000 bytes" in error["message"]
    assert reply.headers is not None and reply.headers["nats-service-error-code"] == "400"
    await eventually(lambda: not mesh.worker.running_count)
    assert mesh.worker.counter < 500


async def test_a_chunk_that_the_bus_cannot_carry_ends_its_stream(
    mesh: FakeMesh, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt was short enough, and what it is echoed as is not."""
    monkeypatch.setattr(bus_door, "_HEADER_BYTES_MAX", mesh.bus.message_bytes_max - 2_000)
    mesh.worker.pause_s = 0.01
    body: dict[str, object] = {"prompt": "a" * 2_000, "echo": True, "stream": True}
    (reply,) = await stream(client, subjects.COMPLETIONS, body | {"max_tokens": 300})
    assert (reply.headers or {})["pagemesh-error"] == "answer_too_large"
    await eventually(lambda: not mesh.worker.running_count)


async def test_a_link_that_was_lost_for_a_moment_ends_no_stream(
    nats_server: NatsServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_door, "_PROBE_MS", 0)  # each message asks whether somebody listens
    async with fake_mesh(nats_server.url, model_folder) as mesh:
        mesh.worker.pause_s = 0.3
        client = await nats.connect(nats_server.url)
        inbox = client.new_inbox()
        sub = await client.subscribe(inbox)
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 6, "stream": True}
        await client.publish(subjects.COMPLETIONS, json.dumps(body).encode(), reply=inbox)
        got = [await sub.next_msg(timeout=10)]
        assert mesh.bus._link is not None
        mesh.bus._link._lose("a flap")
        while (got[-1].headers or {}).get(bus_door.LAST) != "true":
            got.append(await sub.next_msg(timeout=10))
        assert all(bus_door.ERROR not in (message.headers or {}) for message in got)
        await client.close()
