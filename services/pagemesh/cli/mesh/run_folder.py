"""The folder of one running ``pagemesh up``: pool, locks, the NATS server's configuration.

    <pool folder>/up-<random>/up.lock     locked for as long as that `up` lives
                              secret      kept with the pool, whose contents it keys
                              ...         pool files, worker locks, nats-server.conf

A folder whose ``up.lock`` is free is an orphan of a killed ``up``. The next ``up`` adopts the first
orphan with a pool of its own host, so that the cache is still warm, and removes the others,
including the pools of other hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagemesh.kernels.native.locks import holder_is_dead, is_at
from pagemesh.runtime.user_paths import naming
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.pool_format import HOLDERS_SUFFIX, PINS_SUFFIX, POOL_SUFFIX, RETIRED_SUFFIX

PREFIX = "up-"
LOCK_NAME = "up.lock"
SECRET_NAME = "secret"
GATEWAY = "gateway"
_FOLDER_COUNT_MAX = 256


@dataclass(slots=True)
class RunFolder:
    path: Path
    adopted: bool
    removed_count: int
    lock: int
    """The descriptor that holds the lock on ``up.lock``."""

    def keep(self, files: Mapping[Path, str]) -> None:
        """Restore those of ``files`` and our lock that were deleted: without them commands do not
        find the mesh, and another `up` takes the folder for an orphan. Raises ``OSError``, and
        ``ConfigError`` when another `up` has the folder by now."""
        _make_private(self.path)
        with _alone_in(self.path.parent, waits=False):
            if not self.holds():
                raise ConfigError(f"{self.path}: another `pagemesh up` has it")
        put_back(files)

    def holds(self) -> bool:
        """Whether we hold the folder's lock. A lock file that was deleted or is free is locked
        anew."""
        if is_at(self.path / LOCK_NAME, self.lock):
            return True
        held = _try_lock(self.path / LOCK_NAME)
        if held is not None:
            os.close(self.lock)
            self.lock = held
        return held is not None

    def secret(self, disk_folder: Path | None = None) -> str:
        """The mesh's secret: the one that keys the pages of the disk tier, else that of the adopted
        pool, else a new one. It is stored in both folders, so that either's pages are found again.
        If ``disk_folder`` cannot be used, the tier will not be either, so that is no error."""
        kept = _kept_secret(self.path)
        secret = kept or secrets.token_hex(32)
        if disk_folder is not None:
            with contextlib.suppress(OSError):
                disk_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with _alone_in(disk_folder):  # another `up` may start with the same disk
                    found = _kept_secret(disk_folder)
                    if not found:
                        _keep_secret(disk_folder, secret)
                secret = found or secret
        if secret != kept:
            _keep_secret(self.path, secret)
        return secret


def has_damaged_secret(folder: Path) -> bool:
    """Whether the secret's file is damaged, so that pages keyed with it cannot be found."""
    try:
        return bool((folder / SECRET_NAME).read_bytes()) and not _kept_secret(folder)
    except OSError:
        return False


def _kept_secret(folder: Path) -> str:
    """The stored secret; empty if there is none or the file is damaged, by a full disk under an
    earlier version or by a loss of power: other characters could not be passed in an environment
    variable."""
    file = folder / SECRET_NAME
    text = file.read_text("ascii", "replace") if file.exists() else ""
    return text if text.isascii() and text.isprintable() else ""


def _keep_secret(folder: Path, secret: str) -> None:
    """Store the secret atomically, so that neither a full disk nor a kill leaves half of it for the
    next mesh."""
    _write_whole(folder / SECRET_NAME, secret)


def put_back(files: Mapping[Path, str]) -> None:
    """Write those of ``files`` (path -> content) that are missing, and make their folders if
    needed. Raises ``OSError``, and ``ConfigError`` when a folder is not ours: the contents are
    private."""
    for path, text in files.items():
        if not path.exists():
            _make_private(path.parent)
            _write_whole(path, text)


def _make_private(folder: Path) -> None:
    """Make a mesh's folder and its parent, and check that they are ours: once they were deleted,
    anybody may have made others of the same name. Raises ``OSError`` or ``ConfigError``."""
    for place in (folder.parent, folder):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(place)


def _write_whole(path: Path, text: str) -> None:
    """Write a private file atomically, even if the power fails. Raises ``OSError``."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        write_private(fresh, text)
        _sync(fresh)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)


@contextmanager
def run_folder(base: Path, host: str) -> Iterator[RunFolder]:
    """A folder for ``host`` below ``base``, removed at the end. Raises ``ConfigError`` when
    ``base`` cannot be made or belongs to someone else."""
    with naming(f"PAGEMESH_POOL_DIR={base} (--pool-dir)"):
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(base)
    with _alone_in(base):
        folder = _adopt_or_make(base, host)
    try:
        yield folder
    finally:
        _remove(base, folder)
        os.close(folder.lock)


def _remove(base: Path, folder: RunFolder) -> None:
    """Remove the folder, with ``base`` locked: that takes seconds with a large pool, and the lock
    file may go first. An `up` that starts meanwhile would adopt the rest as an orphan, and then
    lose what it writes there."""
    with contextlib.ExitStack() as alone:
        with contextlib.suppress(OSError):  # ``base`` was deleted
            alone.enter_context(_alone_in(base))
        with contextlib.suppress(OSError):  # the folder was deleted
            if folder.holds():
                shutil.rmtree(folder.path, ignore_errors=True)


def orphan_pool_bytes(base: Path) -> int:
    """Bytes that killed meshes left below ``base``: pools, and pages kept in memory beside them.
    The next ``up`` adopts or removes all of it. 0 if ``base`` does not exist or is not ours."""
    if not _usable(base):
        return 0
    total = 0
    with _alone_in(base):
        for folder, lock in _orphans(base):
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # its writer still lives
                    total += path.lstat().st_blocks * 512
            os.close(lock)
    return total


def check_owner(base: Path) -> None:
    """Raises ``ConfigError`` unless ``base`` is ours alone or does not exist yet."""
    named = f"PAGEMESH_POOL_DIR={base} (--pool-dir)"
    with naming(named):
        if not base.exists():
            return
        facts = base.stat()
    if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o022:
        raise ConfigError(f"{named}: must be yours and writable by nobody else (chmod 700)")


def running_folders(base: Path) -> list[Path]:
    """The folders below ``base`` whose `pagemesh up` is alive."""
    if not _usable(base):
        return []
    with _alone_in(base):
        return [folder for folder in _folders(base) if not holder_is_dead(folder / LOCK_NAME)]


def running_urls(base: Path, role: str) -> dict[Path, str]:
    """File -> URL: the URL for ``role`` that each running mesh below ``base`` has written."""
    found: dict[Path, str] = {}
    for folder in running_folders(base):
        file = folder / url_file_name(role)
        with contextlib.suppress(FileNotFoundError):  # not yet, or its `up` has just ended
            found[file] = file.read_text().strip()
    return {file: url for file, url in found.items() if url}


def url_file_name(role: str) -> str:
    """Name of the private file that holds the URL for a bus user, or that of the ``GATEWAY``."""
    return f"{role}.url"


def _usable(folder: Path) -> bool:
    """Whether ``folder`` is a folder with full access. ``os.access`` comes first, since ``is_dir``
    raises if a parent may not be searched."""
    return os.access(folder, os.R_OK | os.W_OK | os.X_OK) and folder.is_dir()


def _folders(base: Path) -> list[Path]:
    """The folders of our own meshes; others may have put files and folders of such names there."""
    found = filter(_usable, sorted(base.glob(PREFIX + "*")))
    return list(itertools.islice(found, _FOLDER_COUNT_MAX))


@contextmanager
def _alone_in(folder: Path, *, waits: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on ``folder``; without ``waits``, raises ``OSError`` if another
    process holds it. It guards all looks below ``base``: a folder that was just made must not look
    like an orphan, nor may the probing of a lock make an orphan look alive."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _adopt_or_make(base: Path, host: str) -> RunFolder:
    adopted: Path | None = None
    adopted_lock = 0
    removed = 0
    for orphan, held in _orphans(base):
        if adopted is None and (orphan / f"{host}{POOL_SUFFIX}").exists():
            adopted, adopted_lock = orphan, held
            _strip(orphan, host)
            continue
        shutil.rmtree(orphan, ignore_errors=True)
        removed += 1
        os.close(held)
    if adopted is not None:
        return RunFolder(adopted, True, removed, adopted_lock)
    path = base / (PREFIX + secrets.token_hex(4))
    path.mkdir(mode=0o700)
    lock = _try_lock(path / LOCK_NAME)
    if lock is None:
        raise ConfigError(f"PAGEMESH_POOL_DIR={base}: file locks do not work there; name another")
    return RunFolder(path, False, removed, lock)


def _orphans(base: Path) -> Iterator[tuple[Path, int]]:
    """Folders of killed meshes, each with the descriptor that now holds its lock."""
    for folder in _folders(base):
        lock = _try_lock(folder / LOCK_NAME)
        if lock is None:
            continue  # another `up` is using it
        if _in_use(folder):
            os.close(lock)
        else:
            yield folder, lock


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


def _strip(folder: Path, host: str) -> None:
    """Remove all but what the next mesh can use: the pool of ``host``, its holders, pins and
    retired roots, and the secret that keys it."""
    suffixes = (POOL_SUFFIX, HOLDERS_SUFFIX, PINS_SUFFIX, RETIRED_SUFFIX)
    kept = {LOCK_NAME, SECRET_NAME, *(host + suffix for suffix in suffixes)}
    for path in folder.iterdir():
        if path.name in kept:
            continue
        if not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
