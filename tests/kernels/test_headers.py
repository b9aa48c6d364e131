"""Page headers: whatever a writer's death leaves behind, no reader believes it wrongly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.kernels.pools import PAGE_SIZE, pool_path, superblock, write_headers

from pagemesh.kernels.native.header_writer import HeaderWriter
from pagemesh.kernels.native.headers import HeaderTable, RootEntry
from pagemesh.kernels.native.library import library
from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.wire.pool_format import (
    LEASE_SLOT_COUNT_MAX,
    SEQUENCE_BITS,
    UNTIL_FOREVER_MS,
    HeaderState,
    PoolFormat,
)
from pagemesh.wire.tokens import pack, pack_extents

OLD, NEW = 10, 20
UNTIL_WORD, CHECK_WORD, BODY_WORDS = 6, 7, (1, 2, 3, 4, 6, *range(8, 16))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolFile]:
    with PoolFile.create(pool_path(tmp_path), superblock()) as made:
        yield made


def published(table: HeaderTable, mark: int, sequence: int) -> NDArray[np.uint64]:
    """The words of page 0 after it was published with ``mark``."""
    write_headers(table, [0], sequence=sequence, mark=mark, state=HeaderState.COMMITTED)
    return raw(table, 0).copy()


def raw(table: HeaderTable, page: int) -> NDArray[np.uint64]:
    form = table.form
    start = form.headers_offset + page * form.header_bytes
    words: NDArray[np.uint64] = table.mapped[start : start + form.header_bytes].view(np.uint64)
    return words


def test_a_published_header_is_read_back_as_it_was_written(pool: PoolFile) -> None:
    write_headers(pool.headers, [3, 5], sequence=OLD, mark=7)
    found = pool.headers.scan(3, 3)
    assert not found.torn.any()
    assert found.batch.states.tolist() == [HeaderState.HELD, HeaderState.FREE, HeaderState.HELD]
    assert found.batch.sequences[[0, 2]].tolist() == [OLD, OLD]
    assert found.batch.identities[0] == 7001
    assert found.batch.parents[0] == 7002
    assert found.batch.writers[0] == 7003
    assert found.batch.until_ms[0] == 7004
    assert (found.batch.roots[0], found.batch.counts[0]) == (7, PAGE_SIZE)
    assert found.batch.tokens[2].tolist() == [7] * PAGE_SIZE


def test_an_odd_page_size_keeps_its_last_token(tmp_path: Path) -> None:
    form = superblock().form
    odd = PoolFormat(4, 7, form.page_bytes)
    table = HeaderTable(np.zeros(odd.file_bytes, np.uint8), odd)
    HeaderWriter(table).write(
        pack_extents([2]), HeaderState.HELD, range(1, 2), writer=1, root=0, tokens=pack(range(7)),
    )  # fmt: skip
    found = table.scan()
    assert found.batch.tokens[2].tolist() == list(range(7))
    assert not found.torn.any()


def test_no_prefix_or_permitted_reordering_of_a_publication_is_believed_wrongly() -> None:
    """Stores between two barriers may arrive in any order and a crash may stop them anywhere,
    so what memory can hold is: all stores of the stages before, and any subset of one stage."""
    form = PoolFormat(2 + 2 ** len(BODY_WORDS) + 2, PAGE_SIZE, 64)
    table = HeaderTable(np.zeros(form.file_bytes, np.uint8), form)
    old, new = published(table, 1, OLD), published(table, 2, NEW)
    assert all(old[word] != new[word] for word in (0, CHECK_WORD, *BODY_WORDS))
    images = [old]
    invalid = old.copy()
    invalid[0] = (HeaderState.INVALID << SEQUENCE_BITS) | NEW
    for chosen in product((False, True), repeat=len(BODY_WORDS)):
        image = invalid.copy()
        written = [word for word, taken in zip(BODY_WORDS, chosen, strict=True) if taken]
        image[written] = new[written]
        images.append(image)
    checked = images[-1].copy()
    checked[CHECK_WORD] = new[CHECK_WORD]
    images += [checked, new]
    for page, image in enumerate(images):
        raw(table, page)[:] = image
    found = table.scan(0, len(images))
    believed = np.flatnonzero(~found.torn).tolist()
    assert believed == [0, len(images) - 1]
    assert found.batch.identities[believed].tolist() == [1001, 2001]
    every = np.arange(len(images), dtype=np.uint32)
    fresh = [page for page in every.tolist() if table.fresh_count(every[page : page + 1], OLD) == 1]
    assert fresh == [0], "only the old header passes for the old grant"


def test_a_state_that_arrived_before_its_body_is_refused_by_the_check_word() -> None:
    """Against the order of stores, as a damaged file may have it."""
    form = PoolFormat(2 ** len(BODY_WORDS), PAGE_SIZE, 64)
    table = HeaderTable(np.zeros(form.file_bytes, np.uint8), form)
    old, new = published(table, 1, OLD), published(table, 2, NEW)
    for page, chosen in enumerate(product((False, True), repeat=len(BODY_WORDS))):
        image = new.copy()
        missing = [word for word, there in zip(BODY_WORDS, chosen, strict=True) if not there]
        image[missing] = old[missing]
        raw(table, page)[:] = image
    assert np.flatnonzero(~table.scan().torn).tolist() == [form.page_count - 1]


def test_a_reader_beside_a_busy_writer_sees_whole_headers_only(pool: PoolFile) -> None:
    table, stop = pool.headers, threading.Event()

    def write() -> None:
        for round_index in range(200_000):
            mark = 1 + round_index % 8
            write_headers(table, range(64), sequence=mark, mark=mark)
            if stop.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        whole = 0
        for _ in range(2_000):
            found = table.scan()
            marks, pages = found.batch.sequences[~found.torn], found.batch.pages[~found.torn]
            whole += len(marks)
            identities = found.batch.identities[~found.torn]
            assert (identities == marks * 1000 + 1 + pages)[marks > 0].all()
            assert (found.batch.tokens[~found.torn] == marks[:, None])[marks > 0].all()
    finally:
        stop.set()
        writer.join()
    assert whole > 0


def test_a_flipped_bit_is_a_torn_header(pool: PoolFile) -> None:
    write_headers(pool.headers, range(64), sequence=OLD)
    for word in range(1, pool.superblock.form.header_words):
        raw(pool.headers, word)[word] ^= np.uint64(1 << (word * 3))
    torn = pool.headers.scan().torn
    assert np.flatnonzero(torn).tolist() == list(range(1, 16))


def test_every_flipped_bit_of_the_time_in_a_header_tears_it(pool: PoolFile) -> None:
    write_headers(pool.headers, range(64), sequence=OLD, state=HeaderState.COMMITTED)
    for bit in range(64):
        raw(pool.headers, bit)[UNTIL_WORD] ^= np.uint64(1 << bit)
    assert pool.headers.scan().torn.all()


def test_keeping_pages_longer_is_one_store_of_a_word_that_is_this_pages_alone(
    pool: PoolFile,
) -> None:
    """So a writer that dies leaves the old time or the new one, and nothing in between."""
    table = pool.headers
    write_headers(table, range(64), sequence=OLD, state=HeaderState.COMMITTED)
    before = [raw(table, page).copy() for page in range(64)]
    HeaderWriter(table).keep(pack_extents(range(1, 64)), 5_000)
    changed = [np.flatnonzero(raw(table, page) != before[page]).tolist() for page in range(64)]
    assert changed == [[], *[[UNTIL_WORD]] * 63]
    found = table.scan()
    assert not found.torn.any()
    assert found.batch.until_ms.tolist() == [1_004, *[5_000] * 63]
    words = [raw(table, page)[UNTIL_WORD] for page in range(64)]
    for page in range(64):  # of a neighbour, or of nobody: believed of no other page
        raw(table, page)[UNTIL_WORD] = words[page - 1] if page % 2 else np.uint64(0)
    assert table.scan().torn.all()


def test_a_time_only_grows_and_what_has_no_end_or_is_not_committed_gets_none(
    pool: PoolFile,
) -> None:
    table, writer = pool.headers, HeaderWriter(pool.headers)
    write_headers(table, [0, 1, 2], sequence=OLD, state=HeaderState.COMMITTED)
    write_headers(table, [3], sequence=OLD)
    writer.write(
        pack_extents([4]), HeaderState.COMMITTED, range(OLD, OLD + 1), writer=1, root=0,
        first_identity=5, tokens=pack(range(PAGE_SIZE)),
    )  # fmt: skip
    writer.keep(pack_extents([1, 3, 4]), 9_000)
    writer.keep(pack_extents([1]), 8_000)
    writer.keep(pack_extents([2]), UNTIL_FOREVER_MS)
    writer.keep(pack_extents([2]), 9_000)
    found = table.scan(0, 5)
    assert not found.torn.any()
    assert found.batch.until_ms.tolist() == [1_004, 9_000, UNTIL_FOREVER_MS, 1_004, 0]
    with pytest.raises(IndexError):
        writer.keep(pack_extents([64]), 1)


def test_tokens_of_what_had_an_end_are_wiped_before_it_is_free(pool: PoolFile) -> None:
    table, writer = pool.headers, HeaderWriter(pool.headers)
    write_headers(table, [0, 1], sequence=OLD, state=HeaderState.COMMITTED)
    writer.write(
        pack_extents([2]), HeaderState.COMMITTED, range(OLD, OLD + 1), writer=1, root=0,
        tokens=pack([1] * PAGE_SIZE),
    )  # fmt: skip
    writer.mark(pack_extents([1, 2]), HeaderState.FREE, range(OLD, OLD + 2))
    kept = [bool(raw(table, page)[8:].any()) for page in range(3)]
    assert kept == [True, False, True]


def test_a_page_given_out_anew_is_stale_for_the_old_grant(pool: PoolFile) -> None:
    table, pages = pool.headers, np.arange(4, dtype=np.uint32)
    write_headers(table, [0, 1, 2, 3], sequence=OLD)
    assert table.fresh_count(pages, OLD) == 4
    write_headers(table, [2], sequence=NEW)
    assert table.fresh_count(pages, OLD) == 2
    assert table.fresh_count(pages, NEW) == 4


@pytest.mark.parametrize("state", [HeaderState.FREE, HeaderState.DRAINING])
def test_a_page_taken_back_is_stale(pool: PoolFile, state: HeaderState) -> None:
    pages = np.arange(3, dtype=np.uint32)
    write_headers(pool.headers, [0, 1, 2], sequence=OLD)
    HeaderWriter(pool.headers).mark(pack_extents([1]), state, range(OLD, OLD + 1))
    assert pool.headers.fresh_count(pages, OLD) == 1


def test_a_header_left_invalid_by_a_dead_writer_is_stale_after_a_bounded_wait(
    pool: PoolFile,
) -> None:
    pages = np.arange(1, dtype=np.uint32)
    write_headers(pool.headers, [0], sequence=OLD)
    HeaderWriter(pool.headers).mark(pack_extents([0]), HeaderState.INVALID, range(OLD, OLD + 1))
    assert pool.headers.fresh_count(pages, OLD) == 0
    assert pool.headers.scan(0, 1).torn.tolist() == [True]


def test_pages_outside_of_the_pool_are_stale_to_readers_and_cannot_be_scanned(
    pool: PoolFile,
) -> None:
    assert pool.headers.fresh_count(np.array([64], np.uint32), NEW) == 0
    with pytest.raises(IndexError, match="65 pages"):
        pool.headers.scan(0, 65)


def test_a_lease_stands_while_its_word_holds_it(pool: PoolFile) -> None:
    pool.headers.set_lease_word(3, 77)
    pool.headers.set_lease_word(4, 1 << 63)
    slots = np.array([3, 3, 4, 5, LEASE_SLOT_COUNT_MAX], np.uint32)
    leases = np.array([77, 78, 1 << 63, 1, 0], np.uint64)
    assert pool.headers.watch(slots, leases).standing() == [True, False, True, False, False]
    as_signed: Any = np.full(100_000, 77, np.int64)
    assert all(pool.headers.watch(np.full(100_000, 3, np.uint32), as_signed).standing())
    with pytest.raises(ValueError, match="5 slots for 4 leases"):
        pool.headers.watch(slots, leases[:4])
    watch = pool.headers.watch(slots[:1], leases[:1])
    assert watch.standing() == [True]
    pool.headers.set_lease_word(3, 0)
    assert watch.standing() == [False]
    assert pool.headers.lease_word(4) == 1 << 63
    with pytest.raises(IndexError):
        pool.headers.set_lease_word(LEASE_SLOT_COUNT_MAX, 1)


def test_roots_are_read_back_and_a_torn_one_is_not(pool: PoolFile) -> None:
    table = pool.headers
    table.store_root(0, b"a" * 32, live=True)
    table.store_root(9, b"b" * 32, live=True)
    table.store_root(9, b"b" * 32, live=False)
    table.store_root(5, b"c" * 32, live=True)
    assert table.roots() == {
        0: RootEntry(b"a" * 32, True),
        5: RootEntry(b"c" * 32, True),
        9: RootEntry(b"b" * 32, False),
    }
    table.mapped[table.form.roots_offset + 5 * 40] ^= 1
    assert sorted(table.roots()) == [0, 9]


def test_the_check_word_covers_every_word_but_the_state_and_itself() -> None:
    words = np.zeros(16, np.uint64)
    address = words.__array_interface__["data"][0]
    plain = library().pm_check_word(address, 16)
    for word in range(16):
        words[word] = 1
        assert (library().pm_check_word(address, 16) == plain) == (word in (0, CHECK_WORD))
        words[word] = 0
