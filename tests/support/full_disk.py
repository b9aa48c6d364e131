"""A stream that nobody can write to."""

from __future__ import annotations

import errno
import io
import os


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, _text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
