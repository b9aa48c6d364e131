"""File locks that tell whether a process still lives.

The kernel releases a lock when its holder dies, however it dies, and keeps it while the holder
is merely stopped. The pager locks the pool file it serves; each worker incarnation locks a file
of its own, and only when that lock is free may its writable pages be given to another worker.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from pagemesh.wire.errors import ConfigError


def try_lock(descriptor: int) -> bool:
    """Take the exclusive lock of an open file without waiting; False when another holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release the lock, even if other descriptors of the same open file remain."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether ``path`` still exists and is the file that was opened."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


class HolderLock:
    """This process's proof of life: a locked file, 0600, removed on ``close``.

    Raises ``ConfigError`` when another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not try_lock(self._descriptor):
            os.close(self._descriptor)
            raise ConfigError(f"{path} is locked by another process; give each a name of its own")

    @property
    def was_removed(self) -> bool:
        """Whether the file was removed, so that other processes cannot tell that this one lives."""
        return self._descriptor >= 0 and not is_at(self.path, self._descriptor)

    def close(self) -> None:
        """Remove the file, then release the lock. Idempotent."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def holder_is_dead(path: Path) -> bool:
    """True when nobody holds the lock of ``path``: its process has ended (or never began)."""
    try:
        descriptor = open_lock(path)
    except FileNotFoundError:
        return True
    try:
        return is_free(descriptor)
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """A descriptor for ``is_free``. Raises ``FileNotFoundError``."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def is_free(descriptor: int) -> bool:
    """Whether nobody else holds the lock of an open file; it is not held afterwards. Several
    processes may ask at once: each takes a shared lock for a moment, which the others do not take
    for a holder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    unlock(descriptor)
    return True
