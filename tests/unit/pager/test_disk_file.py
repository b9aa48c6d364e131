"""The files of the disk tier: what is found again, and what is not believed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.pages.runs import Run
from pagemesh.pager.storage import disk_file, plain_file
from pagemesh.pager.storage.disk_file import DiskFile, DiskPlace, Read
from pagemesh.pager.storage.page_bytes import MappedPages
from pagemesh.pager.storage.plain_file import PlainFile
from pagemesh.pager.tiers.chain_keys import chain_keys, root_chain
from pagemesh.pager.tiers.tier_events import DiskContents, LoadPages, StorePages
from pagemesh.wire.identity import page_digests
from pagemesh.wire.tokens import pack

PAGE_SIZE, PAGE_BYTES, PAGE_COUNT = 4, 512, 8
FACTS = PoolFacts("host", 1, 7, PAGE_COUNT, PAGE_SIZE, PAGE_BYTES, b"l" * 32, "/pool")
CHAIN_KEY, ROOT, WIDTH = b"chains" * 5, b"r" * 32, 4 * PAGE_SIZE
TOKENS = pack(range(3 * PAGE_SIZE))
SLOT_COUNT = 10
POOL = np.random.default_rng(5).integers(0, 256, (PAGE_COUNT, PAGE_BYTES), np.uint8)


def store_of(slots: tuple[int, ...], tokens: bytes = TOKENS, root: bytes = ROOT) -> StorePages:
    """The first pages of ``tokens``, from pool pages 0 on, into ``slots``."""
    count = len(slots)
    chains = tuple(chain_keys(root_chain(CHAIN_KEY, root), tokens, 0, count * WIDTH, WIDTH))
    return StorePages(Run(0, count), slots, tuple(range(count)), chains, root, tokens)


def load_of(slots: tuple[int, ...], tokens: bytes = TOKENS, root: bytes = ROOT) -> LoadPages:
    """The same into pool pages 5 and on."""
    return LoadPages(1, Run(5, 5 + len(slots)), slots, root, tokens[: len(slots) * WIDTH], 0, 0)


@pytest.fixture
def place(tmp_path: Path) -> DiskPlace:
    return DiskPlace(tmp_path / "disk", "host", SLOT_COUNT * (PAGE_BYTES + 128), b"secret" * 8)


def opened(place: DiskPlace, facts: PoolFacts = FACTS) -> tuple[DiskFile, DiskContents]:
    return DiskFile.open(place, facts)


def stored(place: DiskPlace, slots: tuple[int, ...] = (2, 0, 7)) -> None:
    file, _ = opened(place)
    file.store(store_of(slots), POOL[: len(slots)])
    file.close()


def loaded(file: DiskFile, command: LoadPages) -> tuple[int, int | None, np.ndarray]:
    pool = np.zeros((PAGE_COUNT, PAGE_BYTES), np.uint8)
    filling = MappedPages(FACTS, pool).filling(command.pages)
    count, bad, *_ = file.load(command, filling.row, lambda: False)
    return count, bad, pool


def found_slots(place: DiskPlace, facts: PoolFacts = FACTS) -> list[int]:
    file, found = opened(place, facts)
    file.close()
    return list(map(int, found.records.slots))


def test_what_was_stored_is_found_by_the_next_pager_the_oldest_first(place: DiskPlace) -> None:
    stored(place)
    file, found = opened(place)
    assert found.records.slots.tolist() == [2, 0, 7] and found.slot_count == SLOT_COUNT
    assert found.records.chains.tolist() == list(store_of((2, 0, 7)).chains)
    assert found.records.roots == (ROOT,) and not found.dropped_count
    count, bad, pool = loaded(file, load_of((2, 0, 7)))
    assert (count, bad) == (3, None)
    assert np.array_equal(pool[5:8], POOL[:3])
    file.close()


def test_files_are_their_owners_alone_and_a_second_pager_is_refused(place: DiskPlace) -> None:
    file, _ = opened(place)
    for path in place.folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    assert place.folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(OSError, match="another pager uses it"):
        opened(place)
    file.close()


@pytest.mark.parametrize("at", [0, PAGE_BYTES // 2, PAGE_BYTES - 1])
def test_a_flipped_bit_of_a_page_is_seen_when_it_is_read(place: DiskPlace, at: int) -> None:
    stored(place)
    flip(place.folder / "host.disk.pages", 0 * PAGE_BYTES + at)
    file, _ = opened(place)
    count, bad, pool = loaded(file, load_of((2, 0, 7)))
    assert (count, bad) == (1, 0)
    assert not pool[7].any(), "nothing after it is read"
    file.close()


@pytest.mark.parametrize("at", range(0, 128, 9))
def test_a_flipped_bit_of_a_record_loses_that_record_alone(place: DiskPlace, at: int) -> None:
    stored(place)
    flip(place.folder / "host.disk.index", 4_096 + 2 * 128 + at)
    file, found = opened(place)
    assert (found.records.slots.tolist(), found.dropped_count) == ([0, 7], 1)
    assert loaded(file, load_of((2,)))[:2] == (0, 2)
    file.close()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_pages_that_were_cut_off_are_not_found(place: DiskPlace) -> None:
    stored(place)
    os.truncate(place.folder / "host.disk.pages", 7 * PAGE_BYTES + 100)
    assert found_slots(place) == [2, 0]


def test_a_record_that_was_copied_to_another_slot_is_none(place: DiskPlace) -> None:
    stored(place)
    path = place.folder / "host.disk.index"
    data = bytearray(path.read_bytes())
    data[4_096 + 128 : 4_096 + 256] = data[4_096 + 256 : 4_096 + 384]
    path.write_bytes(data)
    assert found_slots(place) == [2, 0, 7]


def test_another_prefix_root_secret_layout_or_page_size_finds_nothing(place: DiskPlace) -> None:
    stored(place)
    file, _ = opened(place)
    other = pack([9, *range(1, 3 * PAGE_SIZE)])
    for command in (load_of((2, 0, 7), other), load_of((2, 0, 7), root=b"o" * 32)):
        assert loaded(file, command)[:2] == (0, 2)
    # The same tokens in the second page, after another first one.
    second = replace_first(load_of((0,), other), 1)
    assert loaded(file, second)[:2] == (0, 0)
    file.close()
    for strange in (
        replace(FACTS, layout_digest=b"m" * 32), replace(FACTS, page_size=8, page_bytes=1024),
    ):  # fmt: skip
        stored(place)
        assert not found_slots(place, strange)
        assert not found_slots(place), "it was made anew"
    stored(place)
    assert not found_slots(replace(place, secret=b"other secret" * 4))


def replace_first(command: LoadPages, first_index: int) -> LoadPages:
    tokens = pack([9, *range(1, 2 * PAGE_SIZE)])
    return LoadPages(1, command.pages, command.slots, command.root, tokens, first_index, 0)


def test_a_smaller_tier_keeps_what_fits_and_a_larger_one_all(place: DiskPlace) -> None:
    stored(place)
    assert found_slots(replace(place, bytes_max=2 * place.bytes_max)) == [2, 0, 7]
    assert found_slots(replace(place, bytes_max=3 * (PAGE_BYTES + 128))) == [2, 0]
    assert found_slots(place) == [2, 0], "the files were cut"
    total = sum(path.stat().st_size for path in place.folder.iterdir())
    assert total <= 3 * (PAGE_BYTES + 128) + 4_096


def test_what_is_forgotten_is_not_found_again(place: DiskPlace) -> None:
    stored(place)
    file, _ = opened(place)
    file.forget(0)
    file.close()
    assert found_slots(place) == [2, 7]


class DyingFile(PlainFile):
    """A file whose process dies after so many bytes written to both."""

    left_bytes = 0

    def write(self, data: bytes | memoryview, offset: int) -> None:
        part = memoryview(data)[: DyingFile.left_bytes]
        DyingFile.left_bytes -= len(part)
        super().write(part, offset)
        if len(part) < len(data):
            raise OSError(errno.EIO, "died")


def test_wherever_a_writer_dies_the_old_page_or_the_new_one_or_none_is_read_never_a_mixture(
    place: DiskPlace,
) -> None:
    newer = pack(range(100, 100 + PAGE_SIZE))
    seen = set()
    for cut in range(0, PAGE_BYTES + 3 * 128, 16):
        stored(place, (3,))
        DyingFile.left_bytes = cut
        file, _ = DiskFile.open(place, FACTS, DyingFile)
        try:
            file.store(store_of((3,), newer), POOL[4:5])
        except OSError:
            pass
        file.close()
        file, found = opened(place)
        old, new = loaded(file, load_of((3,))), loaded(file, load_of((3,), newer))
        if old[0]:
            assert np.array_equal(old[2][5], POOL[0])
        if new[0]:
            assert np.array_equal(new[2][5], POOL[4])
        seen.add((old[0], new[0], len(found.records.slots)))
        file.forget(3)
        file.close()
    assert seen == {(1, 0, 1), (0, 0, 0), (0, 1, 1)}


class RefusingFile(PlainFile):
    """A file that the system does not let us write."""

    code = 0

    def write(self, data: bytes | memoryview, offset: int) -> None:
        if RefusingFile.code:
            raise OSError(RefusingFile.code, os.strerror(RefusingFile.code))
        super().write(data, offset)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_what_the_system_refuses_is_raised_as_it_is(place: DiskPlace, code: int) -> None:
    RefusingFile.code = 0
    file, _ = DiskFile.open(place, FACTS, RefusingFile)
    RefusingFile.code = code
    with pytest.raises(OSError) as caught:
        file.store(store_of((1,)), POOL[:1])
    assert caught.value.errno == code
    file.close()


def test_whatever_goes_wrong_while_files_are_opened_they_are_let_go(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(DiskFile, "_scan", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            opened(place)
    assert not found_slots(place), "another pager would be said to use them"


def test_another_page_that_is_whole_is_no_damage(place: DiskPlace) -> None:
    """Two pages of a root may have the same chain key."""
    stored(place)
    file, _ = opened(place)
    pool = np.zeros((PAGE_COUNT, PAGE_BYTES), np.uint8)
    other = load_of((2, 0, 7), pack([*range(4), 9, *range(5, 12)]))
    for command, is_other in ((other, True), (load_of((2, 7, 0), root=b"o" * 32), False)):
        row = MappedPages(FACTS, pool).filling(command.pages).row
        read = file.load(command, row, lambda: False)
        assert (read.bad_slot, read.is_other) == ((0, True) if is_other else (2, False))
    file.close()


def test_a_path_that_is_stored_from_its_end_on_is_hashed_once_and_others_by_themselves(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = list[int]()

    def counting(key: bytes, root: bytes, tokens: bytes, page_size: int) -> Iterator[bytes]:
        hashed.append(len(tokens) // WIDTH)
        return page_digests(key, root, tokens, page_size)

    monkeypatch.setattr(disk_file, "page_digests", counting)
    file, _ = opened(place)
    for index in (2, 1, 0):
        whole = store_of((0, 1, 2), TOKENS[: (index + 1) * WIDTH])
        command = msgspec.structs.replace(
            whole, pages=Run(index, index + 1), slots=(index,), indexes=(index,),
            chains=(whole.chains[index],),
        )  # fmt: skip
        file.store(command, POOL[index : index + 1])
    assert hashed == [3]
    file.store(store_of((5,), root=b"o" * 32), POOL[:1])
    file.store(store_of((6,), pack(range(4, 8))), POOL[:1])
    assert hashed == [3, 3, 1]
    for wanted, page in ((load_of((0, 1, 2)), 2), (load_of((5,), root=b"o" * 32), 0)):
        count, bad, pool = loaded(file, wanted)
        assert (count, bad) == (len(wanted.slots), None)
        assert np.array_equal(pool[5 + page], POOL[page])
    file.close()
    _, found = opened(place)
    start = root_chain(found.chain_key, ROOT)
    befores = [start, *chain_keys(start, TOKENS, 0, 2 * WIDTH, WIDTH)]
    assert found.records.befores.tolist()[:3] == befores[::-1]


def test_chain_keys_start_from_the_secret_and_are_the_same_in_the_next_life(
    place: DiskPlace,
) -> None:
    keys = list[bytes]()
    for secret in (place.secret, b"other secret" * 4, place.secret):
        file, found = opened(replace(place, secret=secret))
        keys.append(found.chain_key)
        assert repr(found.chain_key) not in repr(found), "it would be in logs"
        file.close()
    assert keys[0] == keys[2] != keys[1]


def test_files_of_an_earlier_format_are_begun_anew(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("pagemesh.pager.storage.disk_file._VERSION", 2)
        stored(place)
        assert found_slots(place) == [2, 0, 7]
    assert not found_slots(place)


def test_reading_stops_when_the_pager_ends(place: DiskPlace) -> None:
    stored(place)
    file, _ = opened(place)
    answers = iter([False, True])
    pool = np.zeros((PAGE_COUNT, PAGE_BYTES), np.uint8)
    command = load_of((2, 0, 7))
    filling = MappedPages(FACTS, pool).filling(command.pages)
    assert file.load(command, filling.row, lambda: next(answers)) == Read(1, None)
    file.close()


def test_pages_of_another_layout_are_not_left_in_the_file(place: DiskPlace) -> None:
    stored(place)
    assert place.path("pages").stat().st_size
    assert not found_slots(place, replace(FACTS, layout_digest=b"m" * 32))
    assert not place.path("pages").stat().st_size


def test_a_file_whose_lock_cannot_be_asked_for_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> bool:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(plain_file, "try_lock", fails)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no locks"):
        PlainFile(tmp_path / "index")
    assert os.listdir("/proc/self/fd") == before
