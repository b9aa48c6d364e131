"""The folder of one running ``pagemesh up``: pools, locks, the server's configuration.

    <pool folder>/up-<random>/up.lock     locked for as long as that `up` lives
                              secret      kept with the pool: it keys what the pool holds
                              ...         pool files, worker locks, nats-server.conf

A folder whose ``up.lock`` is free is an orphan of a killed ``up``. The next one adopts the first
orphan that has a pool of its own host, so that the cache is still warm, and removes the others, and
the pools of other hosts with them.
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
    """The descriptor that holds its ``up.lock``."""

    def keep(self, files: Mapping[Path, str]) -> None:
        """Put back what somebody has removed of ``files`` and of our lock, without which nobody
        finds the mesh, and another `up` takes the folder for an orphan. Raises ``OSError``, or
        ``ConfigError`` when the folder is somebody else's by now."""
        _make_private(self.path)
        with _alone_in(self.path.parent, waits=False):
            if not self.holds():
                raise ConfigError(f"{self.path}: another `pagemesh up` has it")
        put_back(files)

    def holds(self) -> bool:
        """Whether the lock that is there is ours, or nobody's and ours from now on."""
        if is_at(self.path / LOCK_NAME, self.lock):
            return True
        held = _try_lock(self.path / LOCK_NAME)
        if held is not None:
            os.close(self.lock)
            self.lock = held
        return held is not None

    def secret(self, disk_folder: Path | None = None) -> str:
        """The mesh's secret: the one that the disk tier's pages are keyed with, else that of the
        adopted pool, else a new one. It is kept in both places, so that either is found again; if
        ``disk_folder`` cannot be used, nor will the tier be."""
        kept = _kept_secret(self.path)
        secret = kept or secrets.token_hex(32)
        if disk_folder is not None:
            with contextlib.suppress(OSError):
                disk_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with _alone_in(disk_folder):  # another `up` may begin with the same disk
                    found = _kept_secret(disk_folder)
                    if not found:
                        _keep_secret(disk_folder, secret)
                secret = found or secret
        if secret != kept:
            _keep_secret(self.path, secret)
        return secret


def has_damaged_secret(folder: Path) -> bool:
    """Whether what is there is no secret, so that pages keyed with the former are not found."""
    try:
        return bool((folder / SECRET_NAME).read_bytes()) and not _kept_secret(folder)
    except OSError:
        return False


def _kept_secret(folder: Path) -> str:
    """Empty when there is none: when an earlier version left it so on a full disk, too, or a loss
    of power made something else of it, which no environment could carry."""
    file = folder / SECRET_NAME
    text = file.read_text("ascii", "replace") if file.exists() else ""
    return text if text.isascii() and text.isprintable() else ""


def _keep_secret(folder: Path, secret: str) -> None:
    """What a full disk or a kill cut short would be no secret, and the next mesh would find it."""
    _write_whole(folder / SECRET_NAME, secret)


def put_back(files: Mapping[Path, str]) -> None:
    """Write those that somebody has removed, and the folder if need be. Raises ``OSError``, or
    ``ConfigError`` when the folder is not ours: what is in them is for nobody else."""
    for path, text in files.items():
        if not path.exists():
            _make_private(path.parent)
            _write_whole(path, text)


def _make_private(folder: Path) -> None:
    """The folder of a mesh, and the one that it is in. Once they are gone anybody may have made
    others of that name. Raises ``OSError`` or ``ConfigError``."""
    for place in (folder.parent, folder):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(place)


def _write_whole(path: Path, text: str) -> None:
    """Write a private file, all of it or nothing, also if the power fails. Raises ``OSError``."""
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
    """Of a folder that is half gone, which with a large pool takes seconds, the lock may be gone
    first: who starts meanwhile would take it for an orphan, and lose what it writes there."""
    with contextlib.ExitStack() as alone:
        with contextlib.suppress(OSError):  # somebody has removed ``base``
            alone.enter_context(_alone_in(base))
        with contextlib.suppress(OSError):  # nor anything that is not there
            if folder.holds():
                shutil.rmtree(folder.path, ignore_errors=True)


def orphan_pool_bytes(base: Path) -> int:
    """What killed meshes below ``base`` left: pools, and pages kept in memory beside them. The next
    ``up`` adopts or removes all of it. Nothing where ``base`` is not there or not ours."""
    if not _usable(base):
        return 0
    total = 0
    with _alone_in(base):
        for folder, lock in _orphans(base):
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # whose writer is not dead yet
                    total += path.lstat().st_blocks * 512
            os.close(lock)
    return total


def check_owner(base: Path) -> None:
    """Whether ``base`` is ours alone, or not there yet. Raises ``ConfigError``."""
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
    """What each mesh that runs below ``base`` has written down as the URL for ``role``, by file."""
    found: dict[Path, str] = {}
    for folder in running_folders(base):
        file = folder / url_file_name(role)
        with contextlib.suppress(FileNotFoundError):  # not yet, or its `up` has just ended
            found[file] = file.read_text().strip()
    return {file: url for file, url in found.items() if url}


def url_file_name(role: str) -> str:
    """The private file of a mesh that holds a URL: of a user of its bus, or of its ``GATEWAY``."""
    return f"{role}.url"


def _usable(folder: Path) -> bool:
    """Asked for access first, which says no where nobody may even look: ``is_dir`` raises there."""
    return os.access(folder, os.R_OK | os.W_OK | os.X_OK) and folder.is_dir()


def _folders(base: Path) -> list[Path]:
    """Those of meshes of ours: others may have files and folders of such names beside them."""
    found = filter(_usable, sorted(base.glob(PREFIX + "*")))
    return list(itertools.islice(found, _FOLDER_COUNT_MAX))


@contextmanager
def _alone_in(folder: Path, *, waits: bool = True) -> Iterator[None]:
    """One process at a time; without ``waits`` ``OSError`` where there is one already. What is
    below ``base`` is looked at so: a folder that was just made must not look like an orphan, nor
    one that is looked at as if its `up` were alive."""
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
    """Keep what the next mesh can use: the pool of ``host``, who wrote to it, what was decided
    about it, and the secret it is keyed with."""
    suffixes = (POOL_SUFFIX, HOLDERS_SUFFIX, PINS_SUFFIX, RETIRED_SUFFIX)
    kept = {LOCK_NAME, SECRET_NAME, *(host + suffix for suffix in suffixes)}
    for path in folder.iterdir():
        if path.name in kept:
            continue
        if not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
