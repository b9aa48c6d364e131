"""Times in a pool file: of the host, so that the next pager can tell what is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.pager.events import HeaderTable, KeepUntil, WriteHeaders
from pagemesh.pager.pages.runs import Run
from pagemesh.pager.storage.pool_store import PoolStore
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.runtime.clock import HostTime
from pagemesh.wire.pager_messages import PoolSpec
from pagemesh.wire.pool_format import EPOCH_SHIFT, HeaderState
from pagemesh.wire.tokens import pack

SPEC = PoolSpec(layout_digest=b"d" * 32, page_size=4, page_bytes=4_096)
HOUR_MS = 3_600_000


class Host(HostTime):
    """A pager's clock is ``ahead_ms`` behind the host's, one of its ``clocks``; ``boot``: since
    which start it goes, 0 if that is not known."""

    def __init__(self, boot: int = 1, ahead_ms: int = 0, clocks: int = 1) -> None:
        self.boot, self.ahead_ms = bytes([boot]) * 8 + bytes([clocks]) * 8, ahead_ms

    def kept_ms(self, clock_ms: int) -> int:
        return clock_ms + self.ahead_ms

    def clock_ms(self, kept_ms: int) -> int:
        return kept_ms - self.ahead_ms


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Of a pool of eight pages: two that end, two that did, two that never did, two free."""
    PoolStore.create(tmp_path, "host", SPEC, 8 * 4_096).close()
    store = PoolStore.adopt(tmp_path, "host", Host())
    store.recovered(store.scan(), ())
    first = store.facts.epoch << EPOCH_SHIFT
    for page, until_ms in ((0, HOUR_MS), (2, HOUR_MS), (4, FOREVER_MS)):
        store.perform(
            WriteHeaders(
                Run(page, page + 2), HeaderState.COMMITTED, Run(first + page, first + page + 2),
                7, 0, first + 10 + page, 0, pack(range(8)), until_ms,
            )
        )  # fmt: skip
    store.perform(KeepUntil(Run(1, 2), 2 * HOUR_MS))
    store.perform(KeepUntil(Run(2, 6), FOREVER_MS))
    store.close()
    yield tmp_path
    PoolFile.adopt(PoolStore.path_of(tmp_path, "host")).remove()


def found(folder: Path, host: HostTime) -> HeaderTable:
    store = PoolStore.adopt(folder, "host", host)
    headers = store.recovered(store.scan(), ()).headers
    store.close()
    return headers


def test_a_pager_whose_clock_started_elsewhere_finds_the_same_times(folder: Path) -> None:
    times = [HOUR_MS, 2 * HOUR_MS, *[FOREVER_MS] * 6]
    assert found(folder, Host()).until_ms.tolist() == times
    later = [HOUR_MS - 5_000, 2 * HOUR_MS - 5_000, *[FOREVER_MS] * 6]
    assert found(folder, Host(ahead_ms=5_000)).until_ms.tolist() == later


@pytest.mark.parametrize("elsewhere", [Host(clocks=2), Host(boot=0, clocks=2)])
def test_what_ends_by_other_clocks_is_not_believed(folder: Path, elsewhere: Host) -> None:
    states = [*[HeaderState.INVALID] * 4, *[HeaderState.COMMITTED] * 2, *[HeaderState.FREE] * 2]
    assert found(folder, elsewhere).states.tolist() == states
    assert found(folder, Host()).states.tolist() == states, "nor is it ever again"


def test_of_another_start_of_the_machine_no_page_is_believed(folder: Path) -> None:
    """A disk may be behind the file, and have had the headers and not the pages."""
    states = [*[HeaderState.INVALID] * 6, *[HeaderState.FREE] * 2]
    assert found(folder, Host(boot=2)).states.tolist() == states
    assert found(folder, Host(boot=1)).states.tolist() == states, "nor is it ever again"


@pytest.mark.parametrize(("elsewhere", "left"), [(Host(boot=2), 0), (Host(clocks=2), 2)])
def test_who_dies_before_that_is_written_down_is_followed_by_who_writes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: Host, left: int
) -> None:
    def dies(file: PoolFile, boot: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PoolFile, "store_boot", dies)
        store = PoolStore.adopt(folder, "host", elsewhere)
        try:
            store.recovered(store.scan(), ())
        finally:
            store.close()
    states = found(folder, elsewhere).states
    assert np.count_nonzero(states == HeaderState.COMMITTED) == left


def test_a_real_pool_starts_with_the_time_of_this_machine(tmp_path: Path) -> None:
    store = PoolStore.create(tmp_path, "host", SPEC, 4 * 4_096)
    assert store.file.boot == HostTime().boot != bytes(16)
    store.file.remove()


def test_a_header_that_was_damaged_is_not_believed(folder: Path) -> None:
    path = PoolStore.path_of(folder, "host")
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[whole.index(pack(range(4, 8)))] ^= 1  # the tokens of every second page
    path.write_bytes(damaged)
    states = found(folder, Host()).states.tolist()
    assert states.count(HeaderState.INVALID) == 1 and states.count(HeaderState.COMMITTED) == 5
