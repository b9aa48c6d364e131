"""How requests end, as the metrics tell it: each counts once, whatever it ends at."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from tests.unit.gateway.fake_mesh import FakeMesh, fake_mesh
from tests.unit.gateway.support import MODEL, eventually
from tests.unit.gateway.test_call_facts import END_US, START_US, answered, asked_for

from pagemesh.gateway import measures
from pagemesh.gateway.api.api_errors import ApiError, ClientLeft, bad, cancelled, from_fault
from pagemesh.gateway.calls.call_facts import CallFacts, ends_counted, outcome_of
from pagemesh.gateway.doors import asgi, bus_door
from pagemesh.gateway.doors.front import Call
from pagemesh.runtime.bus import Bus
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.settings import GatewayConfig
from pagemesh.runtime.trace import new_trace
from pagemesh.wire import subjects
from pagemesh.wire.errors import Busy, Denied, Disconnected, Fault, Internal, NoCapacity, OverQuota

DOORS = ["http", "bus"]
GOOD: dict[str, object] = {"model": MODEL, "prompt": "abc", "max_tokens": 3}
Ask = Callable[..., Awaitable[int]]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (bad("n", "n must be at least 1"), "refused"),
        (ApiError(404, "the model does not exist", "model", "model_not_found"), "refused"),
        (from_fault(NoCapacity("the prompt can never fit")), "refused"),
        (from_fault(OverQuota("more than its tenant may use")), "refused"),
        (ApiError(429, "your limit is reached", code="quota_exceeded"), "refused"),
        (ApiError(429, "too many requests at once"), "failed"),
        (from_fault(Busy("the queue is full", retry_after_ms=5)), "failed"),
        (Busy("too many calls at once", retry_after_ms=5), "failed"),
        (from_fault(Denied("the gateway may not publish there")), "failed"),
        (ApiError(403, "what we are not allowed ourselves"), "failed"),
        (from_fault(Internal("a bug")), "failed"),
        (ZeroDivisionError(), "failed"),
        (cancelled("stopped"), "failed"),
        (cancelled("slow"), "cancelled"),
        (cancelled("left"), "cancelled"),
        (ClientLeft(), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_a_request_is_refused_where_nobody_but_its_client_can_mend_it(
    error: BaseException, outcome: str
) -> None:
    assert outcome_of(error) == outcome


def test_series_that_alerts_are_about_are_there_before_their_first_event() -> None:
    """What begins at its first events has no rate of them."""
    text = measures.render_metrics().decode()
    for door, endpoint in itertools.product(DOORS, ("chat", "text_completion")):
        for outcome in measures.OUTCOMES:
            assert (
                f'requests_total{{door="{door}",endpoint="{endpoint}",outcome="{outcome}"}}' in text
            )
    for reason in ("silent", "left", "replaced"):
        assert f'gateway_workers_lost_total{{reason="{reason}"}}' in text
        assert f'gateway_pagers_lost_total{{reason="{reason}"}}' in text


def test_what_ends_before_it_is_a_call_counts_once() -> None:
    refused = measures.requests.labels("bus", "chat", "refused")
    before = refused._value.get()
    with pytest.raises(ApiError), ends_counted("bus", chat=True):
        raise bad("n", "n must be at least 1")
    with ends_counted("bus", chat=True):
        pass
    assert refused._value.get() == before + 1


class Counted:
    """What was counted at a door since this was made."""

    def __init__(self, door: str) -> None:
        self._door, self._before = door, self._now(door)

    def _now(self, door: str) -> dict[str, float]:
        return {
            sample.labels["outcome"]: sample.value
            for metric in measures.requests.collect()
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.labels["door"] == door
            and sample.labels["endpoint"] == "text_completion"
        }  # fmt: skip

    @property
    def more(self) -> dict[str, float]:
        now = self._now(self._door)
        return {name: n - was for name, n in now.items() if n != (was := self._before.get(name, 0))}


def closed(error: Exception | None, finish_count: int, **more: object) -> dict[str, float]:
    """What is counted of a call of which so many answers ended."""
    counted = Counted("http")
    facts = CallFacts(asked_for(**more), "http", new_trace(), START_US)
    facts.finish_reasons += ["length"] * finish_count
    if error is not None:
        facts.failed(error)
    facts.close([answered(max(finish_count, 1), 2)], END_US)
    return counted.more


@pytest.mark.parametrize(("finish_count", "outcome"), [(1, "completed"), (0, "cancelled")])
def test_a_client_that_left_when_it_had_all_of_its_answer_was_answered(
    finish_count: int, outcome: str
) -> None:
    assert closed(ClientLeft(), finish_count) == {outcome: 1}


@pytest.mark.parametrize(("finish_count", "outcome"), [(3, "completed"), (1, "cancelled")])
def test_a_call_is_whole_when_all_have_ended_that_the_best_is_chosen_of(
    finish_count: int, outcome: str
) -> None:
    assert closed(None, finish_count, best_of=3) == {outcome: 1}


@pytest.fixture
async def ask(
    mesh: FakeMesh, shared_nats_server: NatsServer, request: pytest.FixtureRequest
) -> AsyncIterator[Ask]:
    """Asks for a completion at a door, and gives the status of the answer."""
    if request.param == "http":
        async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as http:

            async def over_http(body: dict[str, object]) -> int:
                return (await http.post("/v1/completions", json=body)).status_code

            yield over_http
        return
    client = await nats.connect(shared_nats_server.url)

    async def over_bus(body: dict[str, object]) -> int:
        reply = await client.request(subjects.COMPLETIONS, json.dumps(body).encode(), timeout=5)
        return int((reply.headers or {}).get("nats-service-error-code", "200"))

    yield over_bus
    await client.close()


at_both_doors = pytest.mark.parametrize(
    ("ask", "door"), [(door, door) for door in DOORS], indirect=["ask"], ids=DOORS
)


@at_both_doors
async def test_an_answer_is_completed(ask: Ask, door: str) -> None:
    counted = Counted(door)
    assert await ask(GOOD) == 200
    assert counted.more == {"completed": 1}


@at_both_doors
@pytest.mark.parametrize(
    ("wrong", "status"), [({"temperature": 9}, 400), ({"n": "x"}, 400), ({"model": "other"}, 404)]
)
async def test_what_makes_no_sense_is_refused(
    ask: Ask, door: str, wrong: dict[str, object], status: int
) -> None:
    counted = Counted(door)
    assert await ask(GOOD | wrong) == status
    assert counted.more == {"refused": 1}


@at_both_doors
@pytest.mark.parametrize(
    ("fault", "status", "outcome"),
    [
        (OverQuota("more than its tenant may use"), 400, "refused"),
        (Denied("it may not"), 403, "failed"),
    ],
)
async def test_what_a_worker_refuses_is_told_apart(
    mesh: FakeMesh, ask: Ask, door: str, fault: Fault, status: int, outcome: str
) -> None:
    mesh.worker.refusal = fault
    counted = Counted(door)
    assert await ask(GOOD) == status
    assert counted.more == {outcome: 1}


@at_both_doors
@pytest.mark.parametrize("where", ["parse", "answer"])
async def test_a_crash_is_failed(
    mesh: FakeMesh, ask: Ask, door: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_arguments: object) -> None:
        raise ZeroDivisionError

    owner, name = (mesh.front, "_parsed") if where == "parse" else (Call, "_choice_ended")
    monkeypatch.setattr(owner, name, crash)
    counted = Counted(door)
    assert await ask(GOOD) == 500
    assert counted.more == {"failed": 1}


@at_both_doors
@pytest.mark.parametrize(
    ("count_max", "prompts", "status", "outcome"),
    [
        pytest.param(0, ["a"], 429, "failed", id="now"),
        pytest.param(2, ["a", "b", "c"], 400, "refused", id="ever: come again would be no help"),
    ],
)
async def test_who_finds_no_room(
    mesh: FakeMesh, ask: Ask, door: str, monkeypatch: pytest.MonkeyPatch,
    count_max: int, prompts: list[str], status: int, outcome: str,
) -> None:  # fmt: skip
    gateway, counted = mesh.front.gateway, Counted(door)
    monkeypatch.setattr(gateway, "request_count_max", count_max)
    assert await ask(GOOD | {"prompt": prompts}) == status
    assert counted.more == {outcome: 1}
    monkeypatch.setattr(gateway, "request_count_max", len(prompts))
    assert await ask(GOOD | {"prompt": prompts}) == 200


async def test_how_many_prompts_may_be_in_a_call_is_told(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh.front.gateway, "request_count_max", 2)
    async with httpx.AsyncClient(base_url=mesh.url, timeout=10) as http:
        answer = await http.post("/v1/completions", json=GOOD | {"prompt": ["a", "b", "c"]})
    assert answer.json()["error"]["message"] == "3 prompts exceed the limit of 2 requests at once"
    assert answer.json()["error"]["param"] == "prompt" and "retry-after" not in answer.headers


@pytest.mark.parametrize("subject", [subjects.COMPLETIONS, subjects.MODELS])
async def test_a_call_of_the_bus_that_is_not_taken_is_failed_if_it_asks_for_an_answer(
    mesh: FakeMesh, shared_nats_server: NatsServer, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_door, "CALLS_MAX", 0)
    client = await nats.connect(shared_nats_server.url)
    counted = Counted("bus")
    await client.request(subject, b"{}", timeout=5)
    await client.close()
    assert counted.more == ({"failed": 1} if subject == subjects.COMPLETIONS else {})


async def test_an_answer_that_the_bus_does_not_take_is_failed(
    mesh: FakeMesh, shared_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though all of it was there, and its client has not left."""
    publish = Bus.publish

    def away(bus: Bus, subject: str, data: bytes, **more: Any) -> None:
        if bus_door.SEQUENCE in (more.get("headers") or {}):
            raise Disconnected("away")
        publish(bus, subject, data, **more)

    monkeypatch.setattr(Bus, "publish", away)
    client = await nats.connect(shared_nats_server.url)
    counted = Counted("bus")
    inbox = client.new_inbox()
    await client.publish(subjects.COMPLETIONS, json.dumps(GOOD).encode(), reply=inbox)
    await eventually(lambda: counted.more == {"failed": 1})
    await client.close()


async def test_a_body_is_refused_or_its_client_leaves(
    shared_nats_server: NatsServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi, "BODY_READ_S_MAX", 0.1)
    config = GatewayConfig(http_port=0, body_bytes_max=2_000)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: "
    async with fake_mesh(shared_nats_server.url, model_folder, config=config) as mesh:
        port = httpx.URL(mesh.url).port
        for sent, outcome in [(b"2001\r\n\r\n", "refused"), (b"100\r\n\r\n{", "refused")]:
            counted = Counted("http")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + sent)
            assert (await reader.readline()).startswith((b"HTTP/1.1 413", b"HTTP/1.1 408"))
            writer.close()
            assert counted.more == {outcome: 1}
        monkeypatch.setattr(asgi, "BODY_READ_S_MAX", 10.0)
        counted = Counted("http")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"100\r\n\r\n{")
        await asyncio.sleep(0.1)
        writer.close()
        await eventually(lambda: counted.more == {"cancelled": 1})


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("Identity", 200)])
async def test_a_body_that_is_compressed_is_refused(
    mesh: FakeMesh, encoding: str, status: int
) -> None:
    counted = Counted("http")
    async with httpx.AsyncClient(base_url=mesh.url, headers={"content-encoding": encoding}) as http:
        answer = await http.post("/v1/completions", json=GOOD)
    assert answer.status_code == status
    assert counted.more == {"completed" if status == 200 else "refused": 1}


async def test_an_answer_that_is_given_again_is_not_counted_and_another_body_for_its_key_is(
    mesh: FakeMesh,
) -> None:
    async with httpx.AsyncClient(base_url=mesh.url, headers={"idempotency-key": "one"}) as http:
        for body, more in [(GOOD, "completed"), (GOOD, ""), (GOOD | {"n": 2}, "refused")]:
            counted = Counted("http")
            await http.post("/v1/completions", json=body)
            assert counted.more == ({more: 1} if more else {})
