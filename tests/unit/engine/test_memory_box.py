"""The memory of a device's pool goes from worker to pager to worker, and outlives each of them.

Memory of the host without a name stands for that of a GPU: it is shared by descriptor, too.
"""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.pool_memories import SmallCard, memories

from pagemesh.engine.cuda.device import INTERPRETER, SharedMaker
from pagemesh.engine.device_memory import MappedMemory
from pagemesh.engine.memory_box import MemoryBox
from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.runtime.descriptors import Packet, connected, exchange, send
from pagemesh.wire import codec
from pagemesh.wire.errors import Busy, Gone, NoCapacity
from pagemesh.wire.messages import Message, Ok, Refused
from pagemesh.wire.pool_format import MEMORY_SUFFIX
from pagemesh.wire.pool_memory import HandMemory, MovePages
from pagemesh.wire.tokens import pack_extents

POOL = PoolFacts(
    host="here", epoch=1, incarnation=77, page_count=4, page_size=16, page_bytes=4096,
    layout_digest=b"d" * 32, path="/pool", place=INTERPRETER,
)  # fmt: skip
SIZE = POOL.page_count * POOL.page_bytes
OTHER = replace(POOL, incarnation=78)
WORKER = """
import pathlib, sys, time
from pagemesh.engine.cuda.device import SharedMaker
from pagemesh.engine.memory_box import MemoryBox
box = MemoryBox(SharedMaker(), pathlib.Path(sys.argv[1]))
print("listening", flush=True)
sys.stdin.readline()
box.claim(77, 16384)[:] = 5
print("written", flush=True)
time.sleep(60)
"""


class Host:
    """A pool folder with workers' boxes and a pager's memory, closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boxes: list[MemoryBox] = []
        self.pagers: list[PoolMemory] = []

    def path(self, name: str) -> Path:
        return self.folder / f"{name}{MEMORY_SUFFIX}"

    def worker(
        self, name: str, maker: SharedMaker | None = None, *, lets_go: bool = True
    ) -> MemoryBox:
        """Unless it ``lets_go`` a step goes on over what it has mapped."""

        def on_discard() -> None:
            if lets_go:
                made.unmap_discarded()

        made = MemoryBox(maker or SharedMaker(), self.path(name), on_discard)
        self.boxes.append(made)
        return made

    def pager(self) -> PoolMemory:
        self.pagers.append(PoolMemory(self.folder))
        return self.pagers[-1]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield made
    for box in made.boxes:
        box.close()
    for pager in made.pagers:
        pager.close()
    assert not list(tmp_path.iterdir()), "no socket is left"
    # Fewer when what earlier tests had open was collected meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= before, "no descriptor is left"


def test_what_one_worker_writes_the_other_reads(host: Host) -> None:
    first, second, pager = host.worker("first"), host.worker("second"), host.pager()
    pager.make(POOL, "first")
    pager.hand_over(POOL, "first")
    pager.hand_over(POOL, "second")
    mine, theirs = first.claim(77, SIZE), second.claim(77, SIZE)
    assert (mine.dtype, mine.shape) == (torch.uint8, (SIZE,))
    assert not mine.any(), "new memory is zeroed"
    mine[100] = 7
    assert int(theirs[100]) == 7


def test_the_pager_alone_keeps_it_while_no_worker_lives(host: Host) -> None:
    first, pager = host.worker("first"), host.pager()
    pager.make(POOL, "first")
    first.claim(77, SIZE)[:] = 9
    first.close()
    host.boxes.remove(first)
    second = host.worker("second")
    assert pager.find(POOL, []), "it needs nobody"
    pager.hand_over(POOL, "second")
    assert bool((second.claim(77, SIZE) == 9).all())


def test_a_new_pager_gets_it_back_from_whoever_has_it(host: Host) -> None:
    host.worker("first")
    host.pager().make(POOL, "first")
    host.worker("stranger")
    after = host.pager()
    assert after.find(POOL, ["gone", "stranger", "first"])
    after.hand_over(POOL, "stranger")


def test_memory_that_nobody_has_is_not_found(host: Host) -> None:
    host.worker("stranger")
    pager = host.pager()
    assert not pager.find(POOL, ["gone", "stranger"])
    assert not pager.find(POOL, [])


def test_memory_of_another_pool_is_not_taken_for_this_one(host: Host) -> None:
    box, pager = host.worker("first"), host.pager()
    pager.make(POOL, "first")
    assert not pager.find(OTHER, ["first"])
    with pytest.raises(Gone, match="has not come"):
        box.claim(78, SIZE)


@pytest.fixture
def card() -> SmallCard:
    gc.collect()  # what earlier tests left
    return SmallCard()


def taken(host: Host, name: str, pool: int) -> None:
    """Hand memory over as a pager does that lets go of it at once."""
    descriptor = SharedMaker().make(SIZE)
    message = HandMemory(action="take", pool_incarnation=pool, size_bytes=SIZE)
    packet, _ = exchange(host.path(name), Packet(codec.encode(message), descriptor), 5.0)
    os.close(descriptor)
    assert isinstance(codec.decode(packet.data), Ok)


def moved(host: Host, name: str, pool: int) -> Message:
    """What the worker answers who is to copy a page out; it maps the pool for that."""
    message = MovePages(
        direction="out", pool_incarnation=pool, size_bytes=SIZE, page_bytes=POOL.page_bytes,
        extents=pack_extents(np.array([0], np.uint32)),
    )  # fmt: skip
    staging = os.memfd_create("staging")
    os.truncate(staging, POOL.page_bytes)
    packet, _ = exchange(host.path(name), Packet(codec.encode(message), staging), 5.0)
    os.close(staging)
    return codec.decode(packet.data)


def test_with_the_pool_that_follows_it_a_pools_memory_is_let_go(
    host: Host, card: SmallCard
) -> None:
    box = host.worker("first", card)
    taken(host, "first", 77)
    box.claim(77, SIZE)[0] = 1
    (old,) = memories()
    taken(host, "first", 78)
    assert int(box.claim(78, SIZE)[0]) == 0
    assert len(memories() - {old}) == len(memories()) == 1
    with pytest.raises(Gone):
        box.claim(77, SIZE)


def test_memory_that_was_never_claimed_goes_with_what_came_later_and_not_sooner(
    host: Host, card: SmallCard
) -> None:
    box = host.worker("first", card)
    taken(host, "first", 76)
    taken(host, "first", 77)
    box.claim(77, SIZE)
    assert len(memories()) == 1
    taken(host, "first", 78)
    taken(host, "first", 78)
    box.claim(77, SIZE)
    assert len(memories()) == 2
    box.claim(78, SIZE)
    assert len(memories()) == 1


def test_a_device_with_room_for_one_pool_has_the_next_one_when_all_let_go(
    host: Host, card: SmallCard
) -> None:
    boxes, pager = [host.worker("first", card), host.worker("second", card)], host.pager()
    pager.make(POOL, "first")
    pager.hand_over(POOL, "second")
    for box in boxes:
        box.claim(77, SIZE)
    assert isinstance(moved(host, "first", 77), Ok)
    pager.make(OTHER, "second", ["first", "second"])
    pager.hand_over(OTHER, "first")
    for box in boxes:
        assert not box.claim(78, SIZE).any()
        with pytest.raises(Gone):
            box.claim(77, SIZE)
    assert len(memories()) == 1


def test_memory_whose_maker_nobody_heard_is_let_go_before_the_next_is_made(
    host: Host, card: SmallCard
) -> None:
    host.worker("first", card)
    message = HandMemory(action="make", pool_incarnation=1, size_bytes=SIZE)
    packet, _ = exchange(host.path("first"), Packet(codec.encode(message)), 5.0)
    packet.close()
    assert len(memories()) == 1
    host.pager().make(POOL, "first")


def test_where_a_step_goes_on_over_the_pool_before_the_next_is_asked_for_again(
    host: Host, card: SmallCard
) -> None:
    host.worker("first", card)
    box, pager = host.worker("second", card, lets_go=False), host.pager()
    pager.make(POOL, "first")
    pager.hand_over(POOL, "second")
    pages = box.claim(77, SIZE)
    with pytest.raises(Busy, match=r"second may have .*the card is full") as caught:
        pager.make(OTHER, "first", ["second"])
    assert caught.value.retry_after_ms
    pages[:] = 3
    del pages
    assert box.is_discarded
    box.unmap_discarded()
    pager.make(OTHER, "first", ["second"])


def test_a_device_that_is_too_small_is_so_whoever_let_go(host: Host) -> None:
    class Small(SharedMaker):
        def make(self, size_bytes: int) -> int:
            raise NoCapacity("the device is full")

    host.worker("first", Small())
    host.worker("second", Small())
    with pytest.raises(NoCapacity, match="the device is full"):
        host.pager().make(POOL, "first", ["second"])


def test_a_worker_that_ends_does_not_wait_for_its_steps_to_let_go(host: Host) -> None:
    box, pager = host.worker("first", lets_go=False), host.pager()
    pager.make(POOL, "first")
    box.claim(77, SIZE)
    message = HandMemory(action="keep_only", pool_incarnation=78, size_bytes=SIZE)
    with connected(host.path("first"), 5.0) as connection:
        send(connection, Packet(codec.encode(message)))
        while not box.is_discarded:
            time.sleep(0.001)
        began = time.monotonic()
        box.close()
        assert time.monotonic() - began < 1.0
    host.boxes.remove(box)


def test_pages_of_a_pool_that_another_follows_are_moved_no_more(host: Host) -> None:
    host.worker("first")
    taken(host, "first", 77)
    taken(host, "first", 78)
    assert isinstance(moved(host, "first", 77), Refused)
    assert isinstance(moved(host, "first", 78), Ok)


def test_the_map_stays_where_it_is_when_the_same_pool_is_claimed_again(host: Host) -> None:
    box, pager = host.worker("first"), host.pager()
    pager.make(POOL, "first")
    address = box.claim(77, SIZE).data_ptr()
    host.pager().find(POOL, ["first"])
    assert box.claim(77, SIZE).data_ptr() == address


def test_a_worker_that_does_not_answer_is_busy(host: Host) -> None:
    with pytest.raises(Busy, match=r"nobody\.memory"):
        host.pager().make(POOL, "nobody")


def test_too_little_memory_is_said_in_the_words_of_the_maker(host: Host) -> None:
    class Small(SharedMaker):
        def make(self, size_bytes: int) -> int:
            raise NoCapacity("the device is full")

    host.worker("first", Small())
    with pytest.raises(NoCapacity, match="the device is full"):
        host.pager().make(POOL, "first")


def test_a_broken_maker_is_an_answer_too(host: Host) -> None:
    class Broken(SharedMaker):
        def map(self, descriptor: int, size_bytes: int) -> MappedMemory:
            raise RuntimeError("no")

        def make(self, size_bytes: int) -> int:
            raise RuntimeError("the driver is upset")

    host.worker("first", Broken())
    for _ in range(2):
        message = HandMemory(action="make", pool_incarnation=1, size_bytes=1)
        packet, _ = exchange(host.path("first"), Packet(codec.encode(message)), 5.0)
        answer = codec.decode(packet.data)
        assert isinstance(answer, Refused)
        assert "upset" in answer.message


@pytest.mark.parametrize("data", [b"nonsense", codec.encode(Ok())])
def test_nonsense_is_refused_and_the_box_serves_on(host: Host, data: bytes) -> None:
    host.worker("first")
    packet, _ = exchange(host.path("first"), Packet(data), 5.0)
    assert isinstance(codec.decode(packet.data), Refused)
    host.pager().make(POOL, "first")


def test_a_box_that_could_not_take_a_connection_serves_on(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = host.worker("first")
    listening, errors = box._socket, [OSError(errno.EMFILE, "too many open files")]

    class Failing:
        def accept(self) -> object:
            if errors:
                raise errors.pop()
            return listening.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(listening, name)

    monkeypatch.setattr(box, "_socket", Failing())
    for _ in range(2):  # the thread waits for the first one already
        packet, _ = exchange(host.path("first"), Packet(codec.encode(Ok())), 5.0)
        assert isinstance(codec.decode(packet.data), Refused)
    assert not errors


def test_a_killed_worker_leaves_its_pages_and_counts_as_alive_until_it_has_ended(
    host: Host,
) -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(host.path("first"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert worker.stdin is not None and worker.stdout is not None
    with worker.stdin, worker.stdout:
        assert worker.stdout.readline() == "listening\n"
        pager = host.pager()
        pager.make(POOL, "first")
        worker.stdin.write("go\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "written\n"
        assert not pager.has_exited("first")
        worker.kill()
        deadline = time.monotonic() + 20
        while not pager.has_exited("first"):  # before anybody has waited for it
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker.wait(10)
    host.path("first").unlink()
    assert pager.has_exited("first"), "and stays so"
    second = host.worker("second")
    pager.hand_over(POOL, "second")
    assert bool((second.claim(77, SIZE) == 5).all())
