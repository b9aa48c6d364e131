"""Workers that die or keep silent under a running stream: the client sees one whole answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest
from msgspec import structs
from openai import AsyncOpenAI
from tests.unit.gateway.fake_mesh import FakeMesh, FakeWorker, fake_mesh
from tests.unit.gateway.support import MODEL, eventually

from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.events import Worker
from pagemesh.gateway.calls.spec import RequestLimits
from pagemesh.runtime.bus import BusState
from pagemesh.runtime.directory import Joined, Lost
from pagemesh.runtime.nats_server import NatsServer

TEXT = "said once, in order, by whoever is left"
PATIENT = RequestLimits(silence_ms_max=200, submit_timeout_ms=500, resend_timeout_ms=300)


async def stream_text(mesh: FakeMesh, prompt: str) -> str:
    """The text of one streamed completion as long as its prompt."""
    async with AsyncOpenAI(base_url=mesh.url + "/v1", api_key="-", max_retries=0) as client:
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=len(prompt), stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])


async def test_a_worker_that_dies_mid_stream_is_replaced_by_the_other(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with fake_mesh(
        shared_nats_server.url, model_folder, roles=("decode", "decode"), limits=PATIENT
    ) as mesh:
        for worker in mesh.workers:
            worker.pause_s = 0.01
        await eventually(lambda: len(mesh.front.gateway.router._workers) == 2)
        asked = asyncio.create_task(stream_text(mesh, TEXT))
        await eventually(lambda: any(worker.counter > 5 for worker in mesh.workers))
        victim = next(worker for worker in mesh.workers if worker.submits)
        victim.stop_all()
        lost = Worker(victim.name, victim.incarnation)
        for life in list(mesh.front.gateway._lives.values()):
            life.feed(ev.WorkerLost(lost))
        assert await asked == TEXT[::-1]
        other = next(worker for worker in mesh.workers if worker is not victim)
        (again,) = other.submits
        assert again.attempt == 2 and len(again.choices[0].generated) > 0


async def test_a_worker_that_does_not_listen_any_more_is_left_before_presence_misses_it(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with fake_mesh(
        shared_nats_server.url, model_folder, roles=("decode", "decode"), limits=PATIENT
    ) as mesh:
        for worker in mesh.workers:
            worker.pause_s = 0.01
        await eventually(lambda: len(mesh.front.gateway.router._workers) == 2)
        asked = asyncio.create_task(stream_text(mesh, TEXT))
        await eventually(lambda: any(worker.counter > 5 for worker in mesh.workers))
        victim = next(worker for worker in mesh.workers if worker.submits)
        victim.stop_all()
        await victim.stop_listening()
        assert await asked == TEXT[::-1]
        assert [len(worker.submits) for worker in mesh.workers] == [1, 1]


async def test_a_silent_worker_is_asked_and_then_left(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with fake_mesh(
        shared_nats_server.url, model_folder, roles=("decode",), limits=PATIENT
    ) as mesh:
        mesh.worker.pause_s = 0.01
        asked = asyncio.create_task(stream_text(mesh, TEXT))
        await eventually(lambda: mesh.worker.counter > 5)
        mesh.worker.stop_all()
        mesh.worker._sent.clear()
        assert await asked == TEXT[::-1]
        assert [submit.attempt for submit in mesh.worker.submits] == [1, 2]


async def test_a_lost_last_frame_is_had_again(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with fake_mesh(
        shared_nats_server.url, model_folder, roles=("decode",), limits=PATIENT
    ) as mesh:
        mesh.worker.drop_counters = {len(TEXT)}
        assert await stream_text(mesh, TEXT) == TEXT[::-1]
        assert len(mesh.worker.submits) == 1


async def test_without_any_worker_a_request_is_refused_after_a_short_wait(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    limits = RequestLimits(worker_wait_ms_max=200)
    async with fake_mesh(shared_nats_server.url, model_folder, roles=(), limits=limits) as mesh:
        with pytest.raises(openai.InternalServerError) as caught:
            await stream_text(mesh, TEXT)
        assert caught.value.status_code == 503
        assert "retry-after" in caught.value.response.headers


def asked_while_one_starts(mesh: FakeMesh, worker: FakeWorker) -> asyncio.Task[str]:
    """A stream that is asked for when ``worker`` has just said that it starts."""
    starting = structs.replace(worker.announce, state="starting", model=None)
    mesh.front.gateway.presence_changed(Joined(starting))
    return asyncio.create_task(stream_text(mesh, TEXT))


async def test_a_request_that_comes_while_the_first_worker_starts_waits_for_it(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    limits = RequestLimits(worker_wait_ms_max=200)
    async with fake_mesh(shared_nats_server.url, model_folder, roles=(), limits=limits) as mesh:
        worker = FakeWorker(mesh.bus, f"first-{mesh.front.gateway.name}", "decode")
        asked = asked_while_one_starts(mesh, worker)
        await asyncio.sleep(5 * limits.worker_wait_ms_max / 1_000)
        async with worker.running():
            assert await asked == TEXT[::-1]


async def test_a_request_waits_no_longer_for_a_first_worker_that_went_again(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    limits = RequestLimits(worker_wait_ms_max=200)
    async with fake_mesh(shared_nats_server.url, model_folder, roles=(), limits=limits) as mesh:
        worker = FakeWorker(mesh.bus, "first", "decode")
        asked = asked_while_one_starts(mesh, worker)
        await asyncio.sleep(2 * limits.worker_wait_ms_max / 1_000)
        mesh.front.gateway.presence_changed(Lost(worker.announce, "left"))
        with pytest.raises(openai.InternalServerError):
            async with asyncio.timeout(2):
                await asked


async def test_a_request_that_comes_after_the_only_worker_died_waits_for_the_next(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    limits = RequestLimits(worker_wait_ms_max=200)
    async with fake_mesh(
        shared_nats_server.url, model_folder, roles=("decode",), limits=limits
    ) as mesh:
        gateway, bus = mesh.front.gateway, mesh.worker.bus
        await eventually(lambda: not gateway.unready_why)
        await mesh.worker.stop_listening()
        first = asyncio.create_task(stream_text(mesh, TEXT))  # finds out
        await eventually(lambda: bool(gateway.unready_why))
        second = asyncio.create_task(stream_text(mesh, TEXT))
        await asyncio.sleep(5 * limits.worker_wait_ms_max / 1_000)
        async with FakeWorker(bus, f"next-{mesh.worker.name}", "decode").running():
            assert [await first, await second] == [TEXT[::-1]] * 2


async def test_a_restarted_nats_server_is_survived_by_a_running_stream(
    nats_server: NatsServer, model_folder: Path
) -> None:
    async with fake_mesh(nats_server.url, model_folder, roles=("decode",), limits=PATIENT) as mesh:
        mesh.worker.pause_s = 0.03
        asked = asyncio.create_task(stream_text(mesh, TEXT))
        await eventually(lambda: mesh.worker.counter > 5)
        nats_server.kill()
        await asyncio.sleep(0.3)
        nats_server.start()
        assert await asked == TEXT[::-1]


async def test_a_request_that_comes_while_the_bus_is_away_waits_for_it_as_for_a_worker(
    nats_server: NatsServer, model_folder: Path
) -> None:
    limits = RequestLimits(worker_wait_ms_max=200)
    async with fake_mesh(nats_server.url, model_folder, roles=("decode",), limits=limits) as mesh:
        assert await stream_text(mesh, TEXT) == TEXT[::-1]
        nats_server.kill()
        gateway = mesh.front.gateway
        await eventually(lambda: gateway.bus.state is not BusState.CONNECTED)
        asked = asyncio.create_task(stream_text(mesh, TEXT))
        await asyncio.sleep(1.0)
        assert not asked.done(), "it was refused, though its worker lives"
        await asyncio.to_thread(nats_server.start)
        assert await asked == TEXT[::-1]


async def test_a_worker_that_was_away_for_a_moment_and_has_no_news_is_asked_again(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    # As when the gateway is back on the bus before the worker is.
    async with fake_mesh(
        shared_nats_server.url, model_folder, roles=("decode",), limits=PATIENT
    ) as mesh:
        assert await stream_text(mesh, TEXT) == TEXT[::-1]
        await mesh.worker.stop_listening()
        asked = asyncio.create_task(stream_text(mesh, TEXT))
        await eventually(lambda: bool(mesh.front.gateway.unready_why))
        await mesh.worker.listen()
        assert await asked == TEXT[::-1]
