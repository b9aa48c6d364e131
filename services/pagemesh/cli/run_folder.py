"""The folder of one running ``pagemesh up``: pools, locks, the server's configuration.

    <pool folder>/up-<random>/up.lock     locked for as long as that `up` lives
                              secret      kept with the pool: it keys what the pool holds
                              ...         pool files, worker locks, nats-server.conf

A folder whose ``up.lock`` is free is an orphan of a killed ``up``. The next one adopts the
first orphan that has a pool, so that the cache is still warm, and removes the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagemesh.kernels.native.locks import holder_is_dead
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.pool_format import LOCK_SUFFIX, POOL_SUFFIX

PREFIX = "up-"
LOCK_NAME = "up.lock"
SECRET_NAME = "secret"
_FOLDER_COUNT_MAX = 256


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path
    adopted: bool
    removed_count: int

    def secret(self, disk_dir: str = "") -> str:
        """The mesh's secret: the adopted one, or a new one. With a disk tier, whose pages are
        keyed with it, it is kept there; if that folder cannot be used, nor will the tier be."""
        if disk_dir:
            with contextlib.suppress(OSError):
                folder = Path(disk_dir).expanduser()
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                return _secret_in(folder)
        return _secret_in(self.path)


def _secret_in(folder: Path) -> str:
    """What is kept in ``folder``, or a new one. It is put there whole: what a full disk or a kill
    cut short would be no secret, and the next mesh would find that one."""
    file = folder / SECRET_NAME
    if not file.exists() or not file.stat().st_size:
        fresh = folder / f"{SECRET_NAME}.{os.getpid()}"
        try:
            write_private(fresh, secrets.token_hex(32))
            fresh.replace(file)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
    return file.read_text()


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)


@contextmanager
def run_folder(base: Path) -> Iterator[RunFolder]:
    """A folder of our own below ``base``, removed at the end. Raises ``ConfigError`` when
    ``base`` cannot be made or belongs to someone else."""
    _prepare(base)
    with _scanning(base):
        folder, lock = _adopt_or_make(base)
    try:
        yield folder
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
        os.close(lock)


def orphan_pool_bytes(base: Path) -> int:
    """What pools of killed meshes below ``base`` take: the next ``up`` adopts or removes them.
    Nothing where ``base`` is not there or not ours."""
    if not os.access(base, os.R_OK | os.W_OK | os.X_OK) or not base.is_dir():
        return 0
    total = 0
    with _scanning(base):
        for folder, lock in _orphans(base):
            total += sum(pool.stat().st_blocks * 512 for pool in folder.glob("*" + POOL_SUFFIX))
            os.close(lock)
    return total


def running_folders(base: Path) -> list[Path]:
    """The folders below ``base`` whose `pagemesh up` is alive."""
    found = []
    for folder in sorted(base.glob(PREFIX + "*"))[:_FOLDER_COUNT_MAX]:
        lock = folder / LOCK_NAME
        if lock.is_file() and not holder_is_dead(lock):
            found.append(folder)
    return found


@contextmanager
def _scanning(base: Path) -> Iterator[None]:
    """One at a time: a folder that was just made must not look like an orphan."""
    descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _adopt_or_make(base: Path) -> tuple[RunFolder, int]:
    """A folder and the descriptor that holds its lock."""
    adopted: Path | None = None
    adopted_lock = 0
    removed = 0
    for orphan, held in _orphans(base):
        if adopted is None and any(orphan.glob("*" + POOL_SUFFIX)):
            adopted, adopted_lock = orphan, held
            _strip(orphan)
            continue
        shutil.rmtree(orphan, ignore_errors=True)
        removed += 1
        os.close(held)
    if adopted is not None:
        return RunFolder(adopted, True, removed), adopted_lock
    path = base / (PREFIX + secrets.token_hex(4))
    path.mkdir(mode=0o700)
    lock = _try_lock(path / LOCK_NAME)
    if lock is None:
        raise ConfigError(f"PAGEMESH_POOL_DIR={base}: file locks do not work there; name another")
    return RunFolder(path, False, removed), lock


def _orphans(base: Path) -> Iterator[tuple[Path, int]]:
    """Folders of killed meshes, each with the descriptor that now holds its lock."""
    for folder in sorted(base.glob(PREFIX + "*"))[:_FOLDER_COUNT_MAX]:
        lock = _try_lock(folder / LOCK_NAME)
        if lock is None:
            continue  # another `up` is using it
        if _in_use(folder):
            os.close(lock)
        else:
            yield folder, lock


def _prepare(base: Path) -> None:
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = base.stat()
    except OSError as error:
        raise ConfigError(f"PAGEMESH_POOL_DIR={base}: {error.strerror}; name another") from None
    if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o022:
        raise ConfigError(
            f"PAGEMESH_POOL_DIR={base}: must be yours and writable by nobody else (chmod 700)"
        )


def _try_lock(path: Path) -> int | None:
    """The descriptor that holds ``path`` locked, or None: someone else does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _in_use(folder: Path) -> bool:
    """Whether any process still holds a file of ``folder`` locked."""
    for path in folder.iterdir():
        if path.name == LOCK_NAME or not path.is_file():
            continue
        held = _try_lock(path)
        if held is None:
            return True
        os.close(held)
    return False


def _strip(folder: Path) -> None:
    """Keep what the next mesh can use: the pools and the secret they are keyed with."""
    kept = {LOCK_NAME, SECRET_NAME}
    for path in folder.iterdir():
        if path.name in kept or path.suffix == POOL_SUFFIX:
            continue
        if path.suffix == LOCK_SUFFIX or path.is_file():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
