"""What a gateway sent to a worker, counted until that says what it has to do."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.unit.gateway.fake_mesh import FakeWorker, fake_mesh
from tests.unit.gateway.support import eventually, frame
from tests.unit.gateway.test_failover import TEXT, stream_text

from pagemesh.gateway.calls import events as ev
from pagemesh.gateway.calls.events import Worker
from pagemesh.gateway.life import Life
from pagemesh.gateway.measures import vllm_aliases
from pagemesh.runtime.directory import Changed, Joined, Lost
from pagemesh.runtime.metrics import REGISTRY
from pagemesh.runtime.nats_server import NatsServer
from pagemesh.wire.presence import Announce, Load
from pagemesh.wire.work_messages import Frames


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


async def test_the_log_tells_of_workers_and_pagers_and_the_metric_why_workers_went(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    def left_count(role: str) -> float:
        name = f"pagemesh_gateway_{role}s_lost_total"
        return REGISTRY.get_sample_value(name, {"reason": "left"}) or 0.0

    async with fake_mesh(shared_nats_server.url, model_folder, roles=("decode",)) as mesh:
        worker = msgspec.structs.replace(mesh.worker.announce, name="decode-2")
        pager = msgspec.structs.replace(mesh.worker.announce, role="pager", name="pager-2")
        before = {role: left_count(role) for role in ("worker", "pager")}
        with capture_logs() as logs:
            for announce in (worker, pager):
                mesh.front.gateway.presence_changed(Joined(announce))
                mesh.front.gateway.presence_changed(Lost(announce, "left"))
        for role, count in before.items():
            assert left_count(role) == count + 1
    told = [(log["event"], log.get("pager"), log.get("reason")) for log in logs]
    assert [entry for entry in told if entry[0].startswith("gateway.")] == [
        ("gateway.worker_joined", None, None),
        ("gateway.worker_lost", None, "left"),
        ("gateway.pager_joined", "pager-2", None),
        ("gateway.pager_lost", "pager-2", "left"),
    ]


async def test_workers_of_another_model_are_neither_waited_for_nor_counted(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    def lost_count() -> float:
        told = REGISTRY.get_sample_value(
            "pagemesh_gateway_workers_lost_total", {"reason": "silent"}
        )
        return told or 0.0

    async with fake_mesh(shared_nats_server.url, model_folder, roles=("decode",)) as mesh:
        gateway, ours = mesh.front.gateway, mesh.worker.announce
        assert ours.model is not None
        other = msgspec.structs.replace(
            ours, name="other", host="b", load=Load(running_count=40),
            model=msgspec.structs.replace(ours.model, model="other", pool_pages=900),
        )  # fmt: skip
        told = vllm_aliases(ours.model.model, [ours, other], [])
        assert told == vllm_aliases(ours.model.model, [ours], []) and b" 40" not in told
        before = lost_count()
        gateway.presence_changed(Joined(msgspec.structs.replace(other, state="starting")))
        gateway.presence_changed(Lost(other, "silent"))
        assert lost_count() == before and not gateway._expected()


class Told:
    """A life that only takes note of what it is fed."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []

    def feed(self, event: ev.Event) -> None:
        self.events.append(event)


async def test_lives_are_told_once_that_a_worker_is_gone_however_many_ask_it_in_vain(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    async with fake_mesh(shared_nats_server.url, model_folder, roles=()) as mesh:
        gateway, told = mesh.front.gateway, Told()
        gateway._lives["one"] = cast(Life, told)
        announce = FakeWorker(mesh.bus, "decode-2", "decode").announce
        who = Worker(announce.name, announce.incarnation)
        for change in (Joined(announce), Changed(announce)):
            told.events.clear()
            gateway.presence_changed(change)
            for _ in range(3):
                gateway.surroundings.absent(who)
            assert told.events == [ev.WorkerLost(who)]


async def test_of_a_worker_that_was_silent_for_a_while_only_what_did_not_come_counts_as_lost(
    shared_nats_server: NatsServer, model_folder: Path
) -> None:
    def lost() -> float:
        return REGISTRY.get_sample_value("pagemesh_gateway_frames_lost_total") or 0.0

    async with fake_mesh(shared_nats_server.url, model_folder, roles=()) as mesh:
        gateway = mesh.front.gateway
        announce = FakeWorker(mesh.bus, "decode-2", "decode").announce

        def hear(counter: int) -> None:
            gateway.received(Frames(
                worker=announce.name, incarnation=announce.incarnation, counter=counter,
                gateway_incarnation=gateway.incarnation, frames=[frame(0, [1], finish="stop")],
            ))  # fmt: skip

        gateway.presence_changed(Joined(announce))
        for counter in range(1, 7):
            hear(counter)
        before = lost()
        gateway.presence_changed(Lost(announce, "silent"))
        hear(8)
        assert lost() == before + 1
