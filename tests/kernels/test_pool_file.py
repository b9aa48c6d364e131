"""Pool files: who may open what, and what is left when somebody dies."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.kernels.pools import pool_path, superblock, write_headers

from pagemesh.kernels.native.locks import HolderLock, holder_is_dead
from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.kernels.native.superblock import Superblock
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.pool_format import PoolFormat


def test_a_new_pool_is_private_whole_and_free(tmp_path: Path) -> None:
    made = superblock()
    with PoolFile.create(pool_path(tmp_path), made) as pool:
        status = os.stat(pool.path)
        assert status.st_mode & 0o777 == 0o600
        assert status.st_size == made.form.file_bytes
        assert status.st_blocks * 512 >= made.form.file_bytes, "every block is allocated"
        assert pool.epoch == 0
        assert len(pool.pages) == made.form.page_count * made.form.page_bytes
        assert not pool.headers.scan().batch.states.any()
        assert [path.name for path in tmp_path.iterdir()] == ["test.pool"]


def test_a_worker_reads_what_the_pager_wrote_and_the_reverse(tmp_path: Path) -> None:
    with PoolFile.create(pool_path(tmp_path), superblock()) as pager:
        write_headers(pager.headers, [1], sequence=5)
        with PoolFile.attach(pager.path) as worker:
            assert worker.superblock == pager.superblock
            assert worker.headers.fresh_count(np.array([1], np.uint32), 5) == 1
            worker.pages[:4] = (1, 2, 3, 4)
            assert pager.pages[:4].tolist() == [1, 2, 3, 4]


def test_an_adopted_pool_keeps_its_headers_and_never_lowers_its_epoch(tmp_path: Path) -> None:
    with PoolFile.create(pool_path(tmp_path), superblock()) as first:
        assert first.bump_epoch() == 1
        write_headers(first.headers, [7], sequence=9)
    with PoolFile.adopt(pool_path(tmp_path)) as second:
        assert second.bump_epoch() == 2
        assert second.headers.scan(7, 1).batch.sequences.tolist() == [9]


def test_a_pool_has_one_pager_at_a_time(tmp_path: Path) -> None:
    with PoolFile.create(pool_path(tmp_path), superblock()) as pool:
        with pytest.raises(ConfigError, match="another pager"):
            PoolFile.adopt(pool.path)
    PoolFile.adopt(pool_path(tmp_path)).remove()
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_was_removed_or_replaced_is_not_in_place(tmp_path: Path) -> None:
    with PoolFile.create(pool_path(tmp_path), superblock()) as pool:
        assert pool.is_in_place
        pool.path.unlink()
        assert not pool.is_in_place
        with PoolFile.create(pool.path, superblock()) as other:
            assert other.is_in_place and not pool.is_in_place


def test_closing_gives_up_the_lock_while_views_keep_the_memory(tmp_path: Path) -> None:
    pool = PoolFile.create(pool_path(tmp_path), superblock())
    view = pool.pages
    pool.close()
    PoolFile.adopt(pool.path).remove()
    view[:] = 7
    assert int(view.sum()) == 7 * len(view)


HUGE = Superblock(PoolFormat(1 << 24, 16, 1 << 24), 1, b"x" * 32)


def test_a_pool_too_large_for_its_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes \d+ MiB, \d+ MiB are free") as caught:
        PoolFile.create(pool_path(tmp_path), HUGE)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_memory_is_not_filled_first_to_find_that_there_is_too_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.EIO, "it was tried")

    monkeypatch.setattr(os, "posix_fallocate", fill)
    with pytest.raises(ConfigError, match=r"takes \d+ MiB, \d+ MiB are free"):
        PoolFile.create(pool_path(tmp_path), HUGE)
    with pytest.raises(ConfigError, match="it was tried"):
        PoolFile.create(pool_path(tmp_path), superblock())
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_blocks=0, f_bfree=0))
    with pytest.raises(ConfigError, match="it was tried"):  # memory without a limit
        PoolFile.create(pool_path(tmp_path), HUGE)


def test_what_a_killed_pager_left_half_made_is_freed_and_in_nobodys_way(tmp_path: Path) -> None:
    mine, other = tmp_path / f"test.{os.getpid()}.new", tmp_path / "test.1.new"
    for left in (mine, other):
        left.write_bytes(bytes(4096))
    busy = tmp_path / "test.2.new"
    with HolderLock(busy), PoolFile.create(pool_path(tmp_path), superblock()) as pool:
        assert pool.path.exists()
        assert busy.exists(), "somebody is making it"
    assert not mine.exists()
    assert not other.exists()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        PoolFile.create(tmp_path / "nowhere" / "a.pool", superblock())
    with pytest.raises(ConfigError, match=r"gone\.pool"):
        PoolFile.attach(tmp_path / "gone.pool")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(b"", "not a pool"), (b"PMPOOL99" + bytes(100), "not a pool"), (bytes(4096), "not a pool")],
)
def test_a_file_that_is_no_pool_is_refused(tmp_path: Path, damage: bytes, reason: str) -> None:
    pool_path(tmp_path).write_bytes(damage)
    with pytest.raises(ConfigError, match=reason):
        PoolFile.attach(pool_path(tmp_path))


def test_a_damaged_or_truncated_pool_is_refused(tmp_path: Path) -> None:
    PoolFile.create(pool_path(tmp_path), superblock()).close()
    whole = pool_path(tmp_path).read_bytes()
    for offset in (8, 16, 40, 60, 81):
        damaged = bytearray(whole)
        damaged[offset] ^= 1
        pool_path(tmp_path).write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"damaged|format"):
            PoolFile.adopt(pool_path(tmp_path))
    pool_path(tmp_path).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="superblock says"):
        PoolFile.attach(pool_path(tmp_path))


def test_pages_on_a_device_are_not_in_the_file_and_it_says_where_they_are(tmp_path: Path) -> None:
    here = superblock()
    there = replace(here, form=replace(here.form, place="cuda:0123"))
    with PoolFile.create(pool_path(tmp_path), there) as pool:
        assert pool.path.stat().st_size == here.form.pages_offset < here.form.file_bytes
        write_headers(pool.headers, [3], sequence=9)
    with PoolFile.attach(pool_path(tmp_path)) as pool:
        assert pool.superblock == there
        with pytest.raises(ValueError, match="are on cuda:0123"):
            _ = pool.pages


def test_a_place_is_part_of_the_check_and_has_a_longest_name(tmp_path: Path) -> None:
    here = superblock()
    plain, there = here.pack(1), replace(here, form=replace(here.form, place="cuda:1")).pack(1)
    assert plain[96:] == bytes(64)
    assert Superblock.unpack(plain) == here
    with pytest.raises(ValueError, match="damaged"):
        Superblock.unpack(plain[:96] + there[96:])
    with pytest.raises(ValueError, match="more than 64 bytes"):
        replace(here, form=replace(here.form, place="x" * 65)).pack(1)


HOLD = """
import sys, time
from pathlib import Path
from pagemesh.kernels.native.locks import HolderLock
from pagemesh.kernels.native.pool_file import PoolFile
lock = HolderLock(Path(sys.argv[1]))
pool = PoolFile.adopt(Path(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_outlives_a_frozen_holder_and_not_a_killed_one(tmp_path: Path) -> None:
    PoolFile.create(pool_path(tmp_path), superblock()).close()
    lock = tmp_path / "worker.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock), str(pool_path(tmp_path))],
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.send_signal(signal.SIGSTOP)
        assert not holder_is_dead(lock)
        with pytest.raises(ConfigError, match="another pager"):
            PoolFile.adopt(pool_path(tmp_path))
        holder.kill()
        holder.wait()
    assert holder_is_dead(lock)
    PoolFile.adopt(pool_path(tmp_path)).close()


def test_a_holder_lock_is_exclusive_and_cleans_up(tmp_path: Path) -> None:
    path = tmp_path / "worker.lock"
    assert holder_is_dead(path), "who never began is not alive"
    with HolderLock(path):
        assert not holder_is_dead(path)
        with pytest.raises(ConfigError, match="locked"):
            HolderLock(path)
    assert not path.exists()


def test_epochs_of_a_new_pool_start_where_it_is_told(tmp_path: Path) -> None:
    made = superblock()
    with PoolFile.create(pool_path(tmp_path), made, epoch=41) as pool:
        assert pool.bump_epoch() == 42
    with PoolFile.adopt(pool_path(tmp_path)) as pool:
        assert pool.epoch == 42 and pool.superblock == made


def test_a_pool_says_which_start_of_the_machine_its_times_are_since(tmp_path: Path) -> None:
    boot = bytes(range(1, 17))
    with PoolFile.create(pool_path(tmp_path), superblock()) as pool:
        assert pool.boot == bytes(16)
        pool.store_boot(boot)
    with PoolFile.adopt(pool_path(tmp_path)) as pool:
        assert pool.boot == boot and pool.superblock == superblock()
