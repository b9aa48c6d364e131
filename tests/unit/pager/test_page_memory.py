"""Pages of the disk tier in memory: what was used last stays, and what comes from there is checked
like what comes from disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.pager.test_disk_file import (
    FACTS,
    PAGE_BYTES,
    PAGE_COUNT,
    POOL,
    flip,
    load_of,
    opened,
    place,
    store_of,
)

from pagemesh.pager.board import PagerSettings
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.service import remove_unused_tier
from pagemesh.pager.storage.disk_file import DiskFile, DiskPlace, Read
from pagemesh.pager.storage.page_bytes import MappedPages
from pagemesh.pager.storage.page_memory import PageMemory

__all__ = ["place"]
PAGES = [bytes([number]) * 8 for number in range(6)]


@pytest.fixture
def memory() -> PageMemory:
    """With room for three pages, of which it has those of slots 10, 11 and 12."""
    made = PageMemory(8, 31)
    for at in range(3):
        made.put(10 + at, memoryview(PAGES[at]))
    return made


def read(memory: PageMemory, slot: int) -> bytes | None:
    target = bytearray(8)
    return bytes(target) if memory.get(slot, memoryview(target)) else None


def test_the_least_recently_used_makes_room(memory: PageMemory) -> None:
    assert read(memory, 10) == PAGES[0]
    memory.put(13, memoryview(PAGES[3]))
    assert [read(memory, slot) for slot in (10, 11, 12, 13)] == [
        PAGES[0], None, PAGES[2], PAGES[3],
    ]  # fmt: skip


def test_a_slot_that_is_written_anew_holds_the_new_page_alone(memory: PageMemory) -> None:
    memory.put(10, memoryview(PAGES[5]))
    assert [read(memory, slot) for slot in (10, 11, 12)] == [PAGES[5], PAGES[1], PAGES[2]]


def test_what_was_dropped_is_not_there_and_its_room_is_used_again(memory: PageMemory) -> None:
    memory.drop(11)
    memory.drop(11)
    memory.put(14, memoryview(PAGES[4]))
    assert [read(memory, slot) for slot in (10, 11, 12, 14)] == [
        PAGES[0], None, PAGES[2], PAGES[4],
    ]  # fmt: skip


def test_without_room_it_keeps_nothing() -> None:
    memory = PageMemory(8, 7)
    memory.put(1, memoryview(PAGES[1]))
    assert read(memory, 1) is None


def loaded(file: DiskFile, slots: tuple[int, ...]) -> tuple[Read, np.ndarray]:
    pool, command = np.zeros((PAGE_COUNT, PAGE_BYTES), np.uint8), load_of(slots)
    return file.load(command, MappedPages(FACTS, pool).filling(command.pages).row, bool), pool


@pytest.fixture
def file(place: DiskPlace) -> Iterator[DiskFile]:
    """With two of its three pages in memory, those of slots 0 and 7."""
    made, _ = opened(replace(place, memory_bytes=2 * PAGE_BYTES))
    made.store(store_of((2, 0, 7)), POOL[:3])
    yield made
    made.close()


def test_a_page_that_is_damaged_in_memory_comes_from_disk(place: DiskPlace) -> None:
    file, _ = opened(replace(place, memory_bytes=3 * PAGE_BYTES))
    with closing(file):
        file.store(store_of((2, 0, 7)), POOL[:3])
        file._memory.put(0, memoryview(bytes(PAGE_BYTES)))
        read, pool = loaded(file, (2, 0, 7))
        assert read[:3] == (3, None, 2) and np.array_equal(pool[5:8], POOL[:3])


def test_pages_come_from_memory_or_from_disk_as_they_were(file: DiskFile) -> None:
    read, pool = loaded(file, (2, 0, 7))
    assert read[:2] == (3, None) and np.array_equal(pool[5:8], POOL[:3])
    assert loaded(file, (2,))[0][:3] == (1, None, 0), "driven out by others"
    assert loaded(file, (2,))[0][:3] == (1, None, 1), "it was read just now"


def test_it_is_said_what_memory_took_and_how_much_there_is(place: DiskPlace) -> None:
    file, found = opened(replace(place, memory_bytes=2 * PAGE_BYTES + 1))
    assert found.memory_pages == 2
    file.store(store_of((2, 0, 7)), POOL[:3])
    began_ns = time.perf_counter_ns()
    assert loaded(file, (2,))[0].memory_ns == 0
    read, _ = loaded(file, (2,))
    assert 0 < read.memory_ns < time.perf_counter_ns() - began_ns
    file.close()


def test_what_is_damaged_in_memory_is_read_from_disk(file: DiskFile) -> None:
    file._memory._rows[:] ^= 1
    read, pool = loaded(file, (2, 0, 7))
    assert read[:3] == (3, None, 0) and np.array_equal(pool[5:8], POOL[:3])


def test_what_is_damaged_on_disk_comes_from_memory(place: DiskPlace) -> None:
    file, _ = opened(replace(place, memory_bytes=3 * PAGE_BYTES))
    file.store(store_of((2, 0, 7)), POOL[:3])
    flip(place.path("pages"), 7 * PAGE_BYTES)
    read, pool = loaded(file, (2, 0, 7))
    assert read[:3] == (3, None, 3) and np.array_equal(pool[5:8], POOL[:3])
    file.close()


def test_what_is_forgotten_is_so_in_memory(file: DiskFile) -> None:
    file.forget(7)
    assert not file._memory.get(7, memoryview(bytearray(PAGE_BYTES)))
    assert loaded(file, (2, 0, 7))[0][:2] == (2, 7)


def test_files_in_memory_have_a_name_of_their_own(place: DiskPlace) -> None:
    file, found = opened(replace(place, medium="memory"))
    assert found.medium == "memory"
    assert {path.name for path in place.folder.iterdir()} == {"host.host.index", "host.host.pages"}
    file.close()


def test_files_in_memory_go_when_there_is_no_tier_for_them_and_nobody_has_them(
    place: DiskPlace,
) -> None:
    """They take the memory of the next one's, be it on disk."""
    memory = replace(place, medium="memory")
    there = PagerSettings(
        place.host, "pager", 1, place.folder, 1 << 20, b"secret", PagerLimits(), False, "lru"
    )
    file, _ = opened(memory)
    for settings in (there, replace(there, disk=place)):
        remove_unused_tier(settings)
        assert len(list(place.folder.iterdir())) == 2, "another pager has them"
    file.close()
    for disk, left in ((memory, 2), (place, 0)):
        remove_unused_tier(replace(there, disk=disk))
        assert len(list(place.folder.iterdir())) == left
    opened(memory)[0].close()
    remove_unused_tier(there)
    assert not list(place.folder.iterdir())
