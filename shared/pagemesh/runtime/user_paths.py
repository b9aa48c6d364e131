"""Paths as users write them: an unusable one becomes a one-line error that names it.

Python's queries return False for a path that does not exist, but raise if it may not be looked
at, if a name is too long, or if a ``~`` is of an unknown user.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagemesh.wire.errors import ConfigError


def expanded(path: str, named: str) -> Path:
    """``path`` with the home folder that its ``~`` stands for. Raises ``ConfigError``, which
    begins with ``named``, if that folder is unknown."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{named}: no home folder is known for its ~; write the path in full"
        ) from None


@contextmanager
def naming(named: str) -> Iterator[None]:
    """Turn an ``OSError`` within this context into a ``ConfigError`` that begins with ``named``."""
    try:
        yield
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"{named}: {why}; name another") from None


def ensure_folder(folder: Path, setting: str) -> Path:
    """``folder``, made for its owner alone if it is missing. Raises ``ConfigError``, which names
    the ``setting``, if it cannot be made or written to."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{setting}={folder}: cannot make this folder ({error.strerror}); name one that can be "
            "written"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting}={folder}: cannot write there; name one that can be written")
    return folder
