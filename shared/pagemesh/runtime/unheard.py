"""Writing for people who may have gone."""

from __future__ import annotations

import contextlib
import sys
from typing import IO, Any

_GONE = contextlib.suppress(OSError, ValueError)
"""A ``ValueError`` is what a stream raises that was closed."""


class Unheard:
    """A stream whose reader may go at any time: a terminal is closed, a pipe's other end dies, the
    disk that a log is on is full. What is then written is lost, and that is all.

    Without a ``stream`` it is the process's stderr, as it is then; there may be none.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._given = stream

    @property
    def _stream(self) -> IO[str] | None:
        return sys.stderr if self._given is None else self._given

    def write(self, text: str) -> int:
        with _GONE:
            if self._stream is not None:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _GONE:
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        with _GONE:
            return self._stream is not None and self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
