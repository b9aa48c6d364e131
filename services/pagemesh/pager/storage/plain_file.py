"""The operations on the files of the disk tier, and the regular files that have them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pagemesh.kernels.native.locks import is_at, try_lock


class FileRemoved(FileNotFoundError):
    """Somebody has removed or replaced a file that we have open: the next pager will not find what
    is written there."""


class File(Protocol):
    """The operations on each of the two files; every method may raise ``OSError``."""

    def size(self) -> int: ...
    def truncate(self, size: int) -> None: ...
    def read_into(self, target: memoryview, offset: int) -> int: ...
    def write(self, data: bytes | memoryview, offset: int) -> None: ...
    def check_in_place(self) -> None: ...
    def close(self) -> None: ...


class PlainFile:
    """A regular file with mode 0600, which we have locked. Raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        try:
            if not try_lock(self._descriptor):
                raise BlockingIOError(0, "another pager uses it", str(path))
        except OSError:
            os.close(self._descriptor)
            raise

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def read_into(self, target: memoryview, offset: int) -> int:
        """Returns how many bytes were read: fewer than wanted at the end of the file."""
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def write(self, data: bytes | memoryview, offset: int) -> None:
        left = memoryview(data)
        while len(left):
            count = os.pwrite(self._descriptor, left, offset)
            left, offset = left[count:], offset + count

    def check_in_place(self) -> None:
        """Raises ``FileRemoved``."""
        if not is_at(self._path, self._descriptor):
            raise FileRemoved(errno.ENOENT, "somebody has removed it", str(self._path))

    def close(self) -> None:
        os.close(self._descriptor)


Opener = Callable[[Path], File]
