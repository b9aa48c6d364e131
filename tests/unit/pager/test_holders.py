"""Who is alive is known though files are removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pagemesh.kernels.native.locks import HolderLock
from pagemesh.pager.events import Holder
from pagemesh.pager.storage import holders as storage
from pagemesh.pager.storage.holders import Holders, lock_owner, owner_in
from pagemesh.wire.errors import Denied

LOCKED = """
import sys, time
from pathlib import Path
from pagemesh.kernels.native.locks import HolderLock
lock = HolderLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where pools lie: on a file system whose files say what /proc/locks says, if any."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.fixture
def worker(memory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of ``first``."""
    command = [sys.executable, "-c", LOCKED, str(memory / "first.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        yield process
        process.kill()


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


def test_a_holder_whose_lock_file_was_removed_can_be_killed(
    memory: Path, worker: subprocess.Popen[str]
) -> None:
    with contextlib.closing(Holders(memory, "host")) as holders:
        holders.remember(Holder(1, "a worker", "first"))
        (memory / "first.lock").unlink()
        assert holders.kill(1)
        worker.wait(20)
        assert holders.is_dead(1)


def line(pid: int, device: int, inode: int) -> str:
    """As the kernel names a lock in /proc/locks."""
    place = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    return f"1: FLOCK  ADVISORY  WRITE {pid} {place} 0 EOF\n"


def test_a_lock_on_another_file_system_whose_file_has_the_same_number_is_not_meant(
    tmp_path: Path,
) -> None:
    file = tmp_path.stat()
    device, inode = file.st_dev, file.st_ino
    elsewhere = os.makedev(os.major(device), os.minor(device) + 16)
    others = line(41, elsewhere, inode) + line(42, device, inode + 1)
    assert owner_in(others + line(43, device, inode), file) == 43
    assert owner_in(others, file) == 0
    waits = line(44, device, inode).replace("1:", "1: ->", 1)
    assert owner_in(line(43, device, inode) + waits, file) == 43
    assert owner_in(line(43, device, inode) * 2, file) == 43, "the list moved while it was read"


def test_of_several_who_are_said_to_hold_a_lock_none_is_its_holder(tmp_path: Path) -> None:
    file = tmp_path.stat()
    assert owner_in("".join(line(pid, file.st_dev, file.st_ino) for pid in (41, 42)), file) == 0


def test_the_holder_of_a_real_lock_is_found(memory: Path, worker: subprocess.Popen[str]) -> None:
    with contextlib.closing(Holders(memory, "host")) as holders:
        assert lock_owner((memory / "first.lock").stat()) == holders.owner("first") == worker.pid


def test_nobody_is_killed_whom_the_kernel_names_by_another_device_and_the_log_says_so_once(
    memory: Path, worker: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems whose files say that they are on a device of their own."""

    def renamed(locks: str, file: os.stat_result) -> int:
        return owner_in(locks.replace(f":{file.st_ino} ", f"0:{file.st_ino} "), file)

    monkeypatch.setattr(storage, "owner_in", renamed)
    with contextlib.closing(Holders(memory, "host")) as holders, capture_logs() as logs:
        holders.remember(Holder(1, "a worker", "first"))
        assert not holders.kill(1) and not holders.kill(1)
        assert worker.poll() is None and holders.owner("first") == 0
        [told] = logs
        assert told["event"] == "pager.holder_not_found" and told["worker"] == "a worker"
        assert "end that worker yourself" in told["next"]
        worker.kill()
        worker.wait(20)
        assert not holders.kill(1) and len(logs) == 1, "of the dead there is nothing to say"


def test_the_log_says_once_that_the_list_cannot_be_written_until_it_can_be(tmp_path: Path) -> None:
    blocked = tmp_path / "host.holders.new"
    with contextlib.closing(Holders(tmp_path, "host")) as holders, capture_logs() as logs:
        for count in (1, 2):
            blocked.mkdir()
            assert holders.write() is not None and holders.write() is not None
            assert [line["event"] for line in logs] == count * ["pager.holders_not_written"]
            blocked.rmdir()
            assert holders.write() is None
    assert "make room in PAGEMESH_POOL_DIR" in logs[0]["next"]


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


def test_of_a_worker_that_was_killed_no_file_is_left_when_it_is_forgotten(tmp_path: Path) -> None:
    holders = Holders(tmp_path, "host")
    with contextlib.closing(holders), HolderLock(tmp_path / "living.lock") as lock:
        for name in ("killed", "found dead"):
            (tmp_path / f"{name}.lock").touch()
            (tmp_path / f"{name}.memory").touch()
        holders.remember(Holder(1, "a worker", "killed"))
        holders.remember(Holder(2, "another", "living"))
        holders.remember(Holder(3, "a third", "found dead"))
        holders.forget(1)
        assert not list(tmp_path.glob("killed.*"))
        assert [one.incarnation for one in holders.living()] == [2]
        assert not list(tmp_path.glob("found dead.*"))
        holders.forget(2)
        assert not lock.was_removed, "it would end"


def test_of_workers_that_were_killed_unheard_of_no_lock_is_left(tmp_path: Path) -> None:
    """The next session finds them. What is young may be about to be locked; a process that moves
    pages of a device may not have ended yet."""
    names = ("killed", "young", "living", "of a device")
    killed, young, living, device = (tmp_path / f"worker-{name}.lock" for name in names)
    killed.touch()
    device.touch()
    device.with_suffix(".memory").touch()
    with contextlib.closing(Holders(tmp_path, "host")) as holders, HolderLock(living):
        for path in (killed, living, device):
            os.utime(path, (1.0, 1.0))
        young.touch()
        holders.remember(Holder(1, "a worker", "worker-of a session"))
        assert not killed.exists()
        assert young.exists() and living.exists() and device.exists()


def test_a_file_of_the_name_of_a_dead_worker_is_left_to_whose_it_is(tmp_path: Path) -> None:
    path = tmp_path / "first.lock"
    path.touch()
    with contextlib.closing(Holders(tmp_path, "host")) as holders:
        holders.remember(Holder(1, "a worker", "first"))
        path.unlink()
        with HolderLock(path) as lock:
            assert holders.is_dead(1)
            holders.forget(1)
            assert not lock.was_removed


def test_a_worker_whose_process_has_not_ended_yet_keeps_its_files(tmp_path: Path) -> None:
    """As long as a device may still write for it."""
    (tmp_path / "first.lock").touch()
    with contextlib.closing(Holders(tmp_path, "host", lambda _name: False)) as holders:
        holders.remember(Holder(1, "a worker", "first"))
        holders.forget(1)
        assert (tmp_path / "first.lock").exists()


def test_who_asks_whether_a_lock_is_held_is_not_taken_for_its_holder(tmp_path: Path) -> None:
    """Several ask at once, of one that is dead, and nobody is killed for it."""
    path = tmp_path / "first.lock"
    path.touch()
    with contextlib.closing(Holders(tmp_path, "host")) as holders, path.open("rb") as asking:
        holders.remember(Holder(1, "a worker", "first"))
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert holders.is_dead(1)
        assert lock_owner(path.stat()) == 0
        assert not holders.kill(1)


def test_a_worker_that_locks_in_another_folder_is_told_which_and_logged_once(
    tmp_path: Path,
) -> None:
    with contextlib.closing(Holders(tmp_path, "host")) as holders, capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(Denied, match=f"first is not held in {tmp_path}.*POOL_DIR.*--host"):
                holders.check_lock("a worker", "first")
        assert [(one["event"], one["worker"]) for one in logs] == [
            ("pager.worker_turned_away", "a worker")
        ]
        with HolderLock(tmp_path / "first.lock"):
            holders.check_lock("a worker", "first")
        with pytest.raises(Denied):
            holders.check_lock("a worker", "first")
        assert len(logs) == 2, "it was there in between"
