"""A pager that takes a pool over says how many pages it does not believe, and counts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.unit.pager.rig import LAYOUT, ROOT

from pagemesh.pager.events import StoreRoot, WriteHeaders
from pagemesh.pager.eviction import Lru
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.measures import damaged_headers
from pagemesh.pager.pages.runs import Run
from pagemesh.pager.state import PagerCore
from pagemesh.pager.storage.holders import Holders
from pagemesh.pager.storage.pool_opening import take_over
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.wire.pager_messages import PoolSpec
from pagemesh.wire.pool_format import EPOCH_SHIFT, HeaderState
from pagemesh.wire.tokens import pack

SPEC = PoolSpec(layout_digest=LAYOUT, page_size=4, page_bytes=4_096)


@pytest.fixture
def store(tmp_path: Path) -> PoolStore:
    """Four pages of a prompt are cached, and four were never used."""
    made = PoolStore.create(tmp_path, "host", SPEC, 8 * 4_096)
    made.perform(StoreRoot(0, ROOT, True))
    first = made.facts.epoch << EPOCH_SHIFT
    made.perform(
        WriteHeaders(
            Run(0, 4), HeaderState.COMMITTED, Run(first, first + 4), 7, 0, first + 10, 0,
            pack(range(16)),
        )
    )  # fmt: skip
    made.close()
    return made


def flip(path: Path, tokens: range) -> None:
    """One bit of the header that has these tokens."""
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[whole.index(pack(tokens))] ^= 1
    path.write_bytes(damaged)


def tear(path: Path) -> None:
    """As a pager leaves it that was killed while it wrote the last of the headers."""
    with contextlib.closing(PoolStore.adopt(path.parent, "host")) as store:
        word = int(store.file.headers.scan(3, 1).batch.sequences[0])
        form, headers = store.file.superblock.form, store.file.headers.mapped
        at = form.headers_offset + 3 * 8 * form.header_words
        headers[at : at + 8].view("<u8")[0] = int(HeaderState.INVALID) << 56 | word


async def taken_over(folder: Path) -> tuple[PagerCore, list[dict[str, Any]]]:
    with (
        contextlib.closing(PoolStore.adopt(folder, "host")) as store,
        contextlib.closing(Holders(folder, "host")) as holders,
        capture_logs() as logs,
    ):
        core = PagerCore(PagerLimits(), store.facts, Lru())
        await take_over(core, store, holders, 1_000)
        core.check()
    return core, [dict(line) for line in logs]


@pytest.mark.parametrize(
    ("damage", "damaged", "unfinished"),
    [(lambda path: flip(path, range(12, 16)), 1, 0), (tear, 1, 1)],
    ids=["a bit flipped", "half-written"],
)
async def test_damaged_headers_are_told_with_what_becomes_of_their_pages_and_counted(
    store: PoolStore, tmp_path: Path, damage: Callable[[Path], None], damaged: int, unfinished: int
) -> None:
    damage(tmp_path / "host.pool")
    before = damaged_headers._value.get()
    core, [line] = await taken_over(tmp_path)
    assert line["event"] == "pager.headers_damaged" and line["log_level"] == "warning"
    assert (line["pages"], line["half_written"], line["of"]) == (damaged, unfinished, 8)
    assert "computed anew" in line["next"]
    assert damaged_headers._value.get() == before + damaged
    assert (core.books.pool.idle, core.books.pool.free) == (3, 5)


@pytest.mark.parametrize("page", [3, 6], ids=["cached", "free"])
@pytest.mark.parametrize("word", range(4))
@pytest.mark.parametrize("bit", [3, 30, 50, 62])
async def test_no_damaged_word_of_a_header_keeps_a_pager_from_its_pool(
    store: PoolStore, tmp_path: Path, page: int, word: int, bit: int
) -> None:
    """What nobody can have numbered is damaged, whoever wrote it."""
    form = store.file.superblock.form
    path = tmp_path / "host.pool"
    with path.open("r+b") as file:
        at = form.headers_offset + 8 * (page * form.header_words + word)
        file.seek(at)
        damaged = int.from_bytes(file.read(8), "little") ^ 1 << bit
        file.seek(at)
        file.write(damaged.to_bytes(8, "little"))
    core, _ = await taken_over(tmp_path)
    # A fence that may have been there is no damage that anybody could see.
    is_fence = word == 0 and bit < 56 and damaged % (1 << 56) <= core.books.facts.first_sequence
    is_harmless = page == 6 or is_fence
    assert core.books.pool.idle == (4 if is_harmless else 3)
    assert core.books.pool.free == 8 - core.books.pool.idle, "nobody lives who may use them"


async def test_what_is_lost_behind_a_damaged_header_is_told_beside_it(
    store: PoolStore, tmp_path: Path
) -> None:
    flip(tmp_path / "host.pool", range(4))
    core, [line] = await taken_over(tmp_path)
    assert (line["pages"], line["behind"]) == (1, 3) and core.books.pool.free == 8


async def test_a_pool_that_is_whole_says_nothing_of_pages_that_were_never_used(
    store: PoolStore, tmp_path: Path
) -> None:
    before = damaged_headers._value.get()
    core, logs = await taken_over(tmp_path)
    assert core.books.pool.idle == 4 and not logs
    assert damaged_headers._value.get() == before
