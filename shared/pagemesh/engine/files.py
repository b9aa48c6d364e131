"""Files that several processes write at once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagemesh.wire.errors import ConfigError


def default_cache_folder() -> Path:
    """This user's folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pagemesh"


def ensure_folder(folder: Path, setting: str) -> Path:
    """``folder``, made for the owner alone. Raises ``ConfigError`` with the ``setting`` that names
    it when that fails."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{setting}={folder}: cannot make this folder ({error.strerror}); name one that can be "
            "written"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: cannot write there; name a folder that can be written")
    return folder


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old content or the new, never a part."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold ``path`` locked; waits for the process that has it. The kernel lets go of the
    lock of a process that dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
