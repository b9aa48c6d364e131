"""Pool files: made and locked by the pager, mapped by pager and workers.

A pool is a plain file, mode 0600. All its blocks are allocated when it is made, so that no access
can fault for lack of space. It is mapped through ``mmap`` and numpy: views keep the map alive, and
the file stays when a process exits (``SharedMemory`` would unlink it).

    create   a new file under a temporary name, locked, then renamed: half a pool is never seen
    adopt    take an existing one over, once its lock is free
    attach   map another process's pool (workers)
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.native.headers import HeaderTable, address_of
from pagemesh.kernels.native.library import library
from pagemesh.kernels.native.locks import is_at, try_lock, unlock
from pagemesh.kernels.native.populate import clear, is_memory
from pagemesh.kernels.native.superblock import (
    BOOT_BYTES,
    BOOT_OFFSET,
    EPOCH_MAX,
    EPOCH_OFFSET,
    Superblock,
)
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.pool_format import IN_FILE, SUPERBLOCK_BYTES


class PoolClosedToUs(ConfigError):
    """There is a pool, but another process serves it or it cannot be opened, which does not mean
    that it is damaged."""


class PoolFile:
    """A mapped pool. Made by ``create``, ``adopt`` or ``attach``; a context manager.

    ``headers`` is its header table, ``pages`` uint8 ``[page_count * page_bytes]``.
    """

    def __init__(self, path: Path, descriptor: int, superblock: Superblock) -> None:
        self.path = path
        self.superblock = superblock
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, superblock.form.file_bytes)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.headers = HeaderTable(self._bytes, superblock.form)

    @classmethod
    def create(cls, path: Path, superblock: Superblock, *, epoch: int = 0) -> PoolFile:
        """Make, allocate, lock and map a pool with all pages FREE; its first epoch follows
        ``epoch``.

        Raises ``ConfigError`` when there is no space or the folder cannot be written.
        """
        size = superblock.form.file_bytes
        _remove_leftovers(path)
        fresh = path.with_suffix(f".{os.getpid()}.new")
        try:
            descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot make a pool in {path.parent}: {error.strerror}") from None
        try:
            if not try_lock(descriptor):  # at once, since an unlocked file counts as a leftover
                raise OSError(errno.EAGAIN, "another pager took it for a leftover; try again")
            _require_room(descriptor, size)
            os.posix_fallocate(descriptor, 0, size)
            if is_memory(descriptor):
                clear(descriptor, size)
            os.pwrite(descriptor, superblock.pack(epoch), 0)
            pool = cls(path, descriptor, superblock)
            fresh.rename(path)
            return pool
        except OSError as error:
            fresh.unlink(missing_ok=True)
            os.close(descriptor)
            raise ConfigError(_no_space(path, size, error)) from None

    @classmethod
    def adopt(cls, path: Path) -> PoolFile:
        """Lock and map a pool that another process left.

        Raises ``ConfigError`` when it is missing or damaged, ``PoolClosedToUs`` when another pager
        serves it or it cannot be opened.
        """
        descriptor = _open(path)
        try:
            if not try_lock(descriptor):
                raise PoolClosedToUs(f"{path} is served by another pager; stop it first")
            return cls(path, descriptor, _read_superblock(path, descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, path: Path) -> PoolFile:
        """Map a pool without its lock. Raises ``ConfigError`` when it is missing or damaged."""
        descriptor = _open(path)
        try:
            return cls(path, descriptor, _read_superblock(path, descriptor))
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def pages(self) -> NDArray[np.uint8]:
        """The page bytes, for ``KvPool``. The map lives as long as any view of it. Raises
        ``ValueError`` when pages are not in the file."""
        form = self.superblock.form
        if form.place != IN_FILE:
            raise ValueError(f"the pages of {self.path} are on {form.place}")
        return self._bytes[form.pages_offset : form.pages_offset + form.all_pages_bytes]

    @property
    def epoch(self) -> int:
        """The number of the pager life that serves, or last served, this pool."""
        epoch: int = library().pm_word_load(address_of(self._bytes) + EPOCH_OFFSET)
        return epoch

    def bump_epoch(self) -> int:
        """Begin a pager's life and return its epoch. Called only by the lock's holder, before its
        first grant. Raises ``ConfigError`` when the pool has had too many."""
        epoch = self.epoch + 1
        if epoch > EPOCH_MAX:
            raise ConfigError(f"{self.path} has had too many pagers; remove it and start anew")
        library().pm_word_store(address_of(self._bytes) + EPOCH_OFFSET, epoch)
        return epoch

    @property
    def boot(self) -> bytes:
        """The boot of the machine, and the clocks, that times in headers count from; zeros: not set
        yet."""
        return self._bytes[BOOT_OFFSET : BOOT_OFFSET + BOOT_BYTES].tobytes()

    def store_boot(self, boot: bytes) -> None:
        """Have times in headers count from ``boot``; there must be none from another boot. Called
        only by the lock's holder. A half-written value equals that of no machine."""
        for at in range(0, BOOT_BYTES, 8):
            word = int.from_bytes(boot[at : at + 8], "little")
            library().pm_word_store(address_of(self._bytes) + BOOT_OFFSET + at, word)

    @property
    def is_memory(self) -> bool:
        """Whether the file exists only in memory."""
        return is_memory(self._descriptor)

    @property
    def is_in_place(self) -> bool:
        """Whether other processes would find this pool under its path; it may have been removed."""
        return is_at(self.path, self._descriptor)

    def close(self) -> None:
        """Release the lock and, once no view is left, the map. The file stays."""
        if self._descriptor >= 0:
            unlock(self._descriptor)  # the map has its own descriptor, which would keep the lock
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Close and unlink: the memory is freed when the last process unmaps it."""
        self.path.unlink(missing_ok=True)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _remove_leftovers(path: Path) -> None:
    """Delete what pagers left that were killed while they made ``path``: nothing else would free
    that memory."""
    for left in path.parent.glob(f"{path.stem}.[0-9]*.new"):
        with contextlib.suppress(FileNotFoundError), left.open("rb") as file:
            if try_lock(file.fileno()):
                left.unlink(missing_ok=True)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ConfigError(f"there is no pool {path}") from None
    except OSError as error:
        raise PoolClosedToUs(f"cannot open the pool {path}: {error.strerror}") from None


def _read_superblock(path: Path, descriptor: int) -> Superblock:
    try:
        superblock = Superblock.unpack(os.pread(descriptor, SUPERBLOCK_BYTES, 0))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; remove it") from None
    size, needed = os.fstat(descriptor).st_size, superblock.form.file_bytes
    if size < needed:
        raise ConfigError(f"{path} has {size} bytes, its superblock says {needed}; remove it")
    return superblock


def _require_room(descriptor: int, size: int) -> None:
    """Raises ``OSError`` when the file system reports too little room. Without this check each
    attempt of a pager that waits for room would first fill the memory to the brim. A file system
    without a limit of its own reports no blocks at all."""
    state = os.fstatvfs(descriptor)
    if state.f_blocks and state.f_bfree * state.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _no_space(path: Path, size: int, error: OSError) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
        return f"cannot make the pool {path}: {error.strerror}"
    state = os.statvfs(path.parent)
    free = state.f_bavail * state.f_frsize
    return (
        f"the pool {path} takes {size / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free in "
        f"{path.parent}; use fewer pages or another PAGEMESH_POOL_DIR"
    )
