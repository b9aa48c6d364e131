"""Files that several processes write at once."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pagemesh.runtime.user_paths import expanded
from pagemesh.wire.errors import ConfigError


def cache_folder(named: str) -> Path:
    """The folder for files that can be recreated: ``named``, or by default the user's own cache
    folder. Raises ``ConfigError`` when the home folder is unknown."""
    folder = named or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/pagemesh"
    return expanded(folder, f"PAGEMESH_CACHE_DIR={folder} (--cache-dir)")


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old content or the new, never a part. The temporary name is random, since
    writers may be in different containers, where process ids repeat."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def remember(path: Path, content: bytes) -> None:
    """``write_atomically`` something that can be computed again; a failed write is ignored."""
    with suppress(OSError):
        write_atomically(path, content)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; waits for the process that holds it. The kernel releases
    the lock of a process that dies. Raises ``ConfigError`` when ``path`` cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"PAGEMESH_CACHE_DIR={path.parent} (--cache-dir): {path.name} cannot be opened "
            f"({error.strerror}); remove it, or name another folder"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
