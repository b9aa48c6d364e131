"""A pager that is restarted takes over a pool whose pages are on a device, or says why not; one
that has another made has let go of the one before."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.support.pool_memories import SmallCard
from tests.unit.pager.actor_rig import HOST, POOL_BYTES, Answers, made_actor

from pagemesh.engine.cuda.device import INTERPRETER
from pagemesh.engine.memory_box import MemoryBox
from pagemesh.kernels.native.locks import HolderLock
from pagemesh.pager.board import PagerSettings
from pagemesh.pager.events import Holder
from pagemesh.pager.limits import PagerLimits, PoolFacts
from pagemesh.pager.storage import pool_memory
from pagemesh.pager.storage.disk_file import DiskPlace
from pagemesh.pager.storage.holders import Holders
from pagemesh.pager.storage.pool_memory import PoolMemory
from pagemesh.pager.storage.pool_opening import adopt_pool, make_pool
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.runtime.descriptors import Packet
from pagemesh.wire.errors import Busy, Fault, Gone
from pagemesh.wire.pager_messages import OpenSession, PoolSpec
from pagemesh.wire.pool_format import IN_FILE, LOCK_SUFFIX, MEMORY_SUFFIX

SPEC = PoolSpec(layout_digest=b"d" * 32, page_size=16, page_bytes=4_096, place=INTERPRETER)
LOCKED = """
import pathlib, sys, time
from pagemesh.kernels.native.locks import HolderLock
lock = HolderLock(pathlib.Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def settings(tmp_path: Path) -> PagerSettings:
    """Of a pager that finds an earlier one's pool, which a worker in this process has a part in."""
    return PagerSettings(
        "host", "pager", 1, tmp_path, 1 << 20, b"secret", PagerLimits(), False, "lru"
    )  # fmt: skip


@pytest.fixture
def card() -> SmallCard:
    return SmallCard()


@pytest.fixture(autouse=True)
def left(settings: PagerSettings, card: SmallCard) -> Iterator[None]:
    folder = settings.folder
    store = PoolStore.create(folder, "host", SPEC, 1 << 20)
    memory = PoolMemory(folder)
    box = MemoryBox(card, folder / f"first{MEMORY_SUFFIX}", lambda: box.unmap_discarded())
    with contextlib.closing(box), HolderLock(folder / f"first{LOCK_SUFFIX}"):
        memory.make(store.facts, "first")
        Holders(folder, "host").remember(Holder(1, "worker", "first"))
        memory.close()
        store.close()
        yield


def test_who_may_use_the_device_still_is_known_before_it_opens_a_session(
    settings: PagerSettings,
) -> None:
    """Its lock alone is no proof of its end: the device may go on writing for a while."""
    holders = Holders(settings.folder, "host")
    holders.remember(Holder(2, "another", "second"))
    path = settings.folder / f"second{LOCK_SUFFIX}"
    with (
        subprocess.Popen(
            [sys.executable, "-c", LOCKED, str(path)], stdout=subprocess.PIPE, text=True
        ) as worker,
        contextlib.closing(PoolMemory(settings.folder)) as memory,
    ):
        assert worker.stdout is not None and worker.stdout.readline() == "locked\n"
        store = asyncio.run(adopt_pool(settings, memory, holders))
        assert store is not None
        assert not memory.has_exited("second")
        worker.kill()
        deadline = time.monotonic() + 20
        while not memory.has_exited("second"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        store.close()


@pytest.mark.parametrize(("asked_bytes", "told_count"), [(4 << 20, 1), (1 << 20, 0)])
def test_a_pool_kept_at_another_size_than_is_asked_for_is_told_once(
    settings: PagerSettings, asked_bytes: int, told_count: int
) -> None:
    with (
        contextlib.closing(PoolMemory(settings.folder)) as memory,
        contextlib.closing(Holders(settings.folder, "host")) as holders,
        capture_logs() as logs,
    ):
        asked = replace(settings, pool_bytes=asked_bytes)
        store = asyncio.run(adopt_pool(asked, memory, holders))
        assert store is not None and store.facts.page_count == 256
        store.close()
    told: list[Any] = [one for one in logs if one["event"] == "pager.pool_kept"]
    assert len(told) == told_count
    for one in told:
        assert (one["pages"], one["wanted_pages"]) == (256, 1_024)
        assert one["workers"] == ["worker"] and "PAGEMESH_POOL_BYTES" in one["next"]


def opening(place: str) -> OpenSession:
    spec = PoolSpec(layout_digest=b"e" * 32, page_size=16, page_bytes=4_096, place=place)
    return OpenSession(worker="late", incarnation=9, role="decode", lock_name="second", pool=spec)


async def replaced(settings: PagerSettings, memory: PoolMemory, place: str) -> PoolFacts:
    """Of a pool that was taken over, after the worker ``second`` has had another made."""
    holders = Holders(settings.folder, "host")
    with contextlib.closing(holders):
        before = await adopt_pool(settings, memory, holders)
        assert before is not None
        before.close()
        (await make_pool(settings, memory, holders, opening(place))).close()
    return before.facts


def test_memory_of_a_worker_that_stands_still_for_a_while_is_waited_for(
    settings: PagerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Fault | None] = [Busy("no answer", retry_after_ms=1)] * 3 + [None]
    ask = PoolMemory._ask

    def slow(*args: Any) -> Packet:
        if (fault := answers.pop(0)) is not None:
            raise fault
        return ask(*args)

    monkeypatch.setattr(PoolMemory, "_ask", slow)
    with contextlib.closing(PoolMemory(settings.folder)) as memory:
        store = asyncio.run(adopt_pool(settings, memory, Holders(settings.folder, "host")))
        assert store is not None and not answers
        store.close()


@pytest.mark.parametrize("fault", [Gone("another pool's"), Busy("no answer", retry_after_ms=1)])
def test_memory_that_no_worker_has_is_not_waited_for_for_ever(
    settings: PagerSettings, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    def refuse(*_: Any) -> Packet:
        raise fault

    monkeypatch.setattr(PoolMemory, "_ask", refuse)
    monkeypatch.setattr(pool_memory, "FIND_S_MAX", 0.2)
    with contextlib.closing(PoolMemory(settings.folder)) as memory:
        assert asyncio.run(adopt_pool(settings, memory, Holders(settings.folder, "host"))) is None


def test_all_let_go_of_the_pool_before_for_the_next_to_have_room(
    settings: PagerSettings, card: SmallCard
) -> None:
    """The pager, and workers that live, whoever makes the next."""
    second = MemoryBox(card, settings.folder / f"second{MEMORY_SUFFIX}")
    with (
        contextlib.closing(PoolMemory(settings.folder)) as memory,
        contextlib.closing(second),
    ):
        before = asyncio.run(replaced(settings, memory, INTERPRETER))
        assert not memory.find(before, ["first", "second"])


def test_a_pager_lets_go_of_memory_when_the_next_pool_is_in_a_file(settings: PagerSettings) -> None:
    with contextlib.closing(PoolMemory(settings.folder)) as memory:
        before = asyncio.run(replaced(settings, memory, IN_FILE))
        assert not memory.find(before, [])


@pytest.mark.parametrize("has_disk", [False, True])
async def test_a_pool_in_a_file_is_let_go_of_before_the_next_takes_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_disk: bool
) -> None:
    """A host mostly has memory for one, and another model's is there after a kill."""
    folder, left = tmp_path / "file", list[str]()
    folder.mkdir()
    actor = made_actor(folder, Answers())
    if has_disk:
        place = DiskPlace(tmp_path / "disk", HOST, 1 << 20, b"secret" * 8)
        actor._settings = replace(actor._settings, disk=place)
    assert actor._holders.write() is None
    asked = opening(IN_FILE)
    others = msgspec.structs.replace(asked.pool, layout_digest=b"f" * 32)
    PoolStore.create(folder, HOST, others, POOL_BYTES).close()
    await actor.begin()
    assert actor._life is not None and actor._life.store.facts.layout_digest == b"f" * 32
    allocate = os.posix_fallocate

    def allocating(descriptor: int, at: int, size: int) -> None:
        left.extend(holds_on(PoolStore.path_of(folder, HOST)))
        allocate(descriptor, at, size)

    monkeypatch.setattr(os, "posix_fallocate", allocating)
    gc.disable()  # it might come in between, and mostly does not
    try:
        with HolderLock(folder / f"second{LOCK_SUFFIX}"):
            await actor._prepare(asked)
    finally:
        gc.enable()
    assert actor._life is not None and actor._life.store.facts.layout_digest == b"e" * 32
    assert not left
    await actor.end()


def holds_on(path: Path) -> list[str]:
    """What keeps the memory of a pool: its name, open files and maps of this process."""
    found = Path("/proc/self/maps").read_text().splitlines()
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread's, closed meanwhile
            found.append(os.readlink(one))
    found += [str(path)] if path.exists() else []
    return [line for line in found if str(path) in line]
