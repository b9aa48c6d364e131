"""Pool files: made and locked by the pager, mapped by everybody on the host.

A pool is a plain file, mode 0600, whose every block is allocated when it is made, so that no
access can fault for want of space. It is mapped through ``mmap`` and numpy: views keep the map
alive, and the file stays when a process exits (``SharedMemory`` would unlink it).

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
    """A pool is there that another process serves, or that cannot be opened: nothing says that it
    is damaged."""


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
        """Make, allocate, lock and map a pool, all pages FREE, to be bumped from ``epoch`` on.

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
            if not try_lock(descriptor):  # at once: an unlocked one is a leftover
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

        Raises ``ConfigError`` when it is missing or damaged, ``PoolClosedToUs``.
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
        ``ValueError`` when they are not in the file."""
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
        """Begin a pager's life; returns the new epoch. Before its first grant, by the lock's
        holder alone. Raises ``ConfigError`` when the pool has had too many."""
        epoch = self.epoch + 1
        if epoch > EPOCH_MAX:
            raise ConfigError(f"{self.path} has had too many pagers; remove it and start anew")
        library().pm_word_store(address_of(self._bytes) + EPOCH_OFFSET, epoch)
        return epoch

    @property
    def boot(self) -> bytes:
        """Which start of the machine, and by which clocks, the times in headers are since; zeros:
        not said yet."""
        return self._bytes[BOOT_OFFSET : BOOT_OFFSET + BOOT_BYTES].tobytes()

    def store_boot(self, boot: bytes) -> None:
        """Times in headers are since ``boot`` from now on; there are none of another. By the lock's
        holder alone. Half of it is that of no machine."""
        for at in range(0, BOOT_BYTES, 8):
            word = int.from_bytes(boot[at : at + 8], "little")
            library().pm_word_store(address_of(self._bytes) + BOOT_OFFSET + at, word)

    @property
    def is_memory(self) -> bool:
        """Whether no disk is behind the file."""
        return is_memory(self._descriptor)

    @property
    def is_in_place(self) -> bool:
        """Whether others would find this pool under its path: somebody may have removed it."""
        return is_at(self.path, self._descriptor)

    def close(self) -> None:
        """Let go of the lock and, once no view is left, of the map. The file stays."""
        if self._descriptor >= 0:
            unlock(self._descriptor)  # the map holds a descriptor of its own, and so the lock
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Close and unlink: the memory goes when the last process unmaps it."""
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
    """Delete what pagers killed while they made ``path`` left: memory nobody would free."""
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
    """Raises ``OSError`` where a file system says by itself that it has no room: memory would be
    filled to the brim first, at each attempt of a pager that waits for it. One without a limit of
    its own has no blocks at all."""
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
