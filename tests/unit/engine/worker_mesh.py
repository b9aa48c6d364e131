"""The parts of a worker process on a real NATS server, with a scripted pager and a gateway that
only listens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.unit.engine.models import save_twin, twins
from tests.unit.engine.script_pager import ScriptPager

from pagemesh.decode.role import role_settings as decode_role
from pagemesh.engine.worker.service import run_worker
from pagemesh.prefill.role import role_settings as prefill_role
from pagemesh.runtime import rpc
from pagemesh.runtime.bus import Bus, Delivery
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.runtime.service import Stop
from pagemesh.runtime.service_config import ServiceConfig, load_service_config
from pagemesh.wire import codec, subjects
from pagemesh.wire.messages import Order, SequenceKey
from pagemesh.wire.pager_messages import Admit
from pagemesh.wire.presence import Announce
from pagemesh.wire.tokens import U32, pack, unpack
from pagemesh.wire.work_messages import (
    Accepted,
    ChoiceStart,
    Frame,
    Frames,
    Sampling,
    Submit,
)

HOST = "here"
GREEDY = Sampling(temperature=0.0, max_tokens=20)
REQUEST = "ab" * 16


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worker") / "model"
    save_twin(folder, twins()["llama"])
    return folder


class Mesh:
    """Workers, a scripted pager, and a gateway that only listens."""

    def __init__(self, bus: Bus, pager: ScriptPager, config: ServiceConfig) -> None:
        self.bus, self.pager, self.config = bus, pager, config
        self.frames: list[Frame] = []
        self.news = asyncio.Event()
        self.ready: dict[str, Announce] = {}

    def hear(self, delivery: Delivery) -> None:
        message = codec.decode(delivery.data)
        if isinstance(message, Frames):
            self.frames += message.frames
        elif isinstance(message, Announce) and message.role != "pager":
            self.ready[message.name] = message
        self.news.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.news.wait(), 0.05)

    @contextlib.asynccontextmanager
    async def worker(self, role: str, name: str) -> AsyncIterator[asyncio.Task[None]]:
        """A worker, once it is ready; it is drained when the context ends."""
        config = replace(self.config, host=replace(self.config.host, name=name))
        settings = (prefill_role if role == "prefill" else decode_role)(config.worker)
        stop = Stop()
        task = asyncio.create_task(run_worker(config, stop, settings))
        await self.until(lambda: task.done() or self._is_ready(name))
        try:
            yield task
        finally:
            stop.request()
            async with asyncio.timeout(20):
                await task

    def _is_ready(self, name: str) -> bool:
        return name in self.ready and self.ready[name].state == "ready"

    async def submit(self, worker: str, message: Submit) -> Accepted:
        """Send ``message``, adapted to the model of that worker."""
        model = self.ready[worker].model
        assert model is not None
        message = structs.replace(message, model_root=model.model_root)
        return await rpc.call(
            self.bus, subjects.worker(worker), message, Accepted, timeout_ms=2_000
        )

    def tokens(self, choice: int = 0, request: str = REQUEST) -> list[int]:
        """Generated tokens in order of position; a token that changed fails the test."""
        found: dict[int, int] = {}
        for frame in self.frames:
            if (frame.key.request, frame.key.choice) == (request, choice):
                for offset, token in enumerate(unpack(frame.tokens).tolist()):
                    assert found.setdefault(frame.first_position + offset, token) == token
        assert sorted(found) == list(range(len(found)))
        return [found[position] for position in sorted(found)]

    def finished(self, choice: int = 0) -> bool:
        return any(frame.finish for frame in self.frames if frame.key.choice == choice)


@pytest.fixture
async def mesh(
    shared_nats_server: NatsServer, bus: Bus, pool_dir: Path, model_folder: Path
) -> AsyncIterator[Mesh]:
    config = load_service_config(
        {
            "PAGEMESH_NATS": shared_nats_server.url,
            "PAGEMESH_HOST": HOST,
            "PAGEMESH_POOL_DIR": str(pool_dir),
            "PAGEMESH_MODEL": str(model_folder),
            "PAGEMESH_MODEL_NAME": "tiny",
            "PAGEMESH_CACHE_DIR": str(model_folder.parent / "cache"),
            "PAGEMESH_DETERMINISTIC": "true",
        }
    )
    async with ScriptPager.serving(bus, pool_dir, HOST) as pager:
        made = Mesh(bus, pager, config)
        heard = [
            await bus.subscribe(subjects.gateway("gate"), made.hear),
            await bus.subscribe(subjects.PRESENCE, made.hear),
        ]
        yield made
        for subscription in heard:
            await bus.unsubscribe(subscription)


def make_admit(prompt: U32, worker: str, incarnation: int) -> Admit:
    """The ``Admit`` that a gateway sends to the scripted pager along with ``make_submit``."""
    return Admit(
        key=SequenceKey(request=REQUEST, attempt=1, choice=0),
        order=Order(priority=0, arrival_us=1, request=REQUEST, choice=0),
        worker=worker, incarnation=incarnation, epoch=1, root=b"\x02" * 32, tokens=pack(prompt),
        reserve_tokens=len(prompt) + GREEDY.max_tokens, deadline_ms=30_000,
    )  # fmt: skip


def make_submit(prompt: U32, *, sampling: Sampling = GREEDY, **fields: Any) -> Submit:
    values: dict[str, Any] = {
        "request": REQUEST, "attempt": 1, "gateway": "gate", "gateway_incarnation": 5,
        "priority": 0, "arrival_us": 1, "root": b"\x02" * 32,
        "model_root": b"\x03" * 32, "prompt": pack(prompt),
        "choices": [ChoiceStart(choice=0)], "sampling": sampling, "deadline_ms": 30_000,
    }  # fmt: skip
    return Submit(**(values | fields))
