"""What goes on at a worker though nobody waits for it is stopped."""

from __future__ import annotations

from tests.unit.gateway.fake_mesh import FakeMesh
from tests.unit.gateway.support import REQUEST, eventually, frame

from pagemesh.gateway.calls.orphans import Orphans
from pagemesh.runtime import rpc
from pagemesh.wire import subjects
from pagemesh.wire.work_messages import Frame, Frames


def test_a_request_is_disowned_once_in_a_while() -> None:
    orphans = Orphans(quiet_ms=100)
    heard = [orphans.heard("a", now_ms) for now_ms in (0, 99, 100, 150, 200)]
    assert heard == [True, False, True, False, True]


def test_frames_that_crossed_the_abort_need_no_second_one() -> None:
    orphans = Orphans(quiet_ms=100)
    orphans.ended("a", 1_000)
    assert not orphans.heard("a", 1_099)
    assert orphans.heard("b", 1_099)
    assert orphans.heard("a", 1_100)


def test_the_list_of_the_disowned_is_bounded() -> None:
    orphans = Orphans(quiet_ms=100, requests_max=2)
    for name in ("a", "b", "a", "c"):
        orphans.ended(name, 0)
        orphans.check()
    assert [orphans.heard(name, 1) for name in ("a", "c", "b")] == [False, False, True]


def say(mesh: FakeMesh, frames: list[Frame], *, life: int, counter: int) -> None:
    """A message of the worker to some life of the gateway."""
    worker = mesh.worker
    message = Frames(
        worker=worker.name, incarnation=worker.incarnation, gateway_incarnation=life,
        counter=counter, frames=frames,
    )  # fmt: skip
    rpc.send(worker.bus, subjects.gateway(mesh.front.gateway.name), message)


async def test_a_worker_is_told_to_stop_what_nobody_waits_for(mesh: FakeMesh) -> None:
    life = mesh.front.gateway.incarnation
    for position in range(5):
        one = frame(position, [1], attempt=3)
        say(mesh, [one], life=life, counter=position + 1)
    await eventually(lambda: bool(mesh.worker.aborts))
    (abort,) = mesh.worker.aborts
    assert (abort.request, abort.attempt, abort.choice) == (REQUEST, 3, None)


async def test_a_last_frame_needs_no_abort(mesh: FakeMesh) -> None:
    life = mesh.front.gateway.incarnation
    say(mesh, [frame(0, [1], finish="length")], life=life, counter=1)
    say(mesh, [frame(0, [1], attempt=2)], life=life, counter=2)
    await eventually(lambda: bool(mesh.worker.aborts))
    assert [abort.attempt for abort in mesh.worker.aborts] == [2]


async def test_messages_to_an_earlier_life_of_the_gateway_do_not_count_as_ours(
    mesh: FakeMesh,
) -> None:
    gateway = mesh.front.gateway
    say(mesh, [frame(0, [1])], life=gateway.incarnation + 1, counter=57)
    await eventually(lambda: bool(mesh.worker.aborts))
    assert gateway._tracker._last == {}
    say(mesh, [frame(0, [1], finish="stop")], life=gateway.incarnation, counter=1)
    await eventually(lambda: list(gateway._tracker._last.values()) == [1])
