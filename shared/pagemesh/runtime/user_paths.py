"""Paths as users write them: what is wrong with one is a line that names it.

Python says that a path is not there where it is not, and raises where nobody may look, where a
name is too long or a ``~`` is nobody's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagemesh.wire.errors import ConfigError


def expanded(path: str, named: str) -> Path:
    """``path`` with the home folder that its ``~`` stands for. Raises ``ConfigError``, which
    begins with ``named``, where nobody knows that folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{named}: no home folder is known for its ~; write the path in full"
        ) from None


@contextmanager
def naming(named: str) -> Iterator[None]:
    """Within it what a path cannot be asked is a ``ConfigError`` that begins with ``named``."""
    try:
        yield
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"{named}: {why}; name another") from None


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
        raise ConfigError(f"{setting}={folder}: cannot write there; name one that can be written")
    return folder
