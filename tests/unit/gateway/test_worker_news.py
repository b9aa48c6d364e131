"""What a gateway sent to a worker, counted until that says what it has to do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.unit.gateway.fake_mesh import FakeWorker, fake_mesh
from tests.unit.gateway.support import eventually
from tests.unit.gateway.test_failover import TEXT, stream_text

from pagemesh.runtime.nats_server import NatsServer
from pagemesh.wire.presence import Announce, Load


async def test_what_was_sent_is_not_counted_for_ever_though_its_worker_announces_the_same(
    shared_nats_server: NatsServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = vars(FakeWorker)["announce"].fget

    def at_rest(worker: FakeWorker) -> Announce:
        said: Announce = tell(worker)
        return msgspec.structs.replace(said, load=Load())

    monkeypatch.setattr(FakeWorker, "announce", property(at_rest))
    async with fake_mesh(shared_nats_server.url, model_folder, roles=("decode",)) as mesh:
        (worker,), known = mesh.workers, mesh.front.gateway.router._workers
        await eventually(lambda: worker.name in known)
        for _ in range(3):
            assert await stream_text(mesh, TEXT) == TEXT[::-1]
        await eventually(lambda: not known[worker.name].queue_tokens)
