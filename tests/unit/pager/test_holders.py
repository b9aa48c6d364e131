"""Who is alive is known though files are removed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from pagemesh.kernels.native.locks import HolderLock
from pagemesh.pager.events import Holder
from pagemesh.pager.storage.holders import Holders

LOCKED = """
import sys, time
from pathlib import Path
from pagemesh.kernels.native.locks import HolderLock
lock = HolderLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


def test_a_holder_whose_lock_file_was_removed_lives_until_it_ends(tmp_path: Path) -> None:
    with contextlib.closing(Holders(tmp_path, "host")) as holders:
        with HolderLock(tmp_path / "first.lock") as lock:
            holders.remember(Holder(1, "a worker", "first"))
            assert not lock.was_removed
            lock.path.unlink()
            assert lock.was_removed
            assert not holders.is_dead(1), "its pages would be somebody else's"
            with HolderLock(tmp_path / "first.lock"):  # another one of this name says nothing
                assert not holders.is_dead(1)
            assert [holder.incarnation for holder in holders.living()] == [1]
        assert holders.is_dead(1) and not holders.living()


def test_a_holder_whose_lock_file_was_removed_can_be_killed(tmp_path: Path) -> None:
    path = tmp_path / "first.lock"
    with (
        contextlib.closing(Holders(tmp_path, "host")) as holders,
        subprocess.Popen(
            [sys.executable, "-c", LOCKED, str(path)], stdout=subprocess.PIPE, text=True
        ) as worker,
    ):
        assert worker.stdout is not None and worker.stdout.readline() == "locked\n"
        holders.remember(Holder(1, "a worker", "first"))
        path.unlink()
        assert holders.kill(1)
        worker.wait(20)
        assert holders.is_dead(1)


def test_no_file_is_kept_open_for_those_who_are_forgotten(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    holders = Holders(tmp_path, "host")
    for number in range(20):
        with HolderLock(tmp_path / f"{number}.lock"):
            holders.remember(Holder(number, "a worker", str(number)))
            holders.remember(Holder(number, "another name", str(number)))
        if number % 2:
            holders.forget(number)
    assert not holders.living()
    holders.remember(Holder(1, "a worker", "1"))
    holders.close()
    assert len(os.listdir("/proc/self/fd")) == before
