"""Writing for people who may have gone, or do not read on."""

from __future__ import annotations

import contextlib
import select
import sys
from typing import IO, Any

_GONE = contextlib.suppress(OSError, ValueError)
"""A ``ValueError`` is what a stream raises that was closed."""
_PIECE_CHARS = 1_000
"""With a line before them under 4,096 bytes, which a pipe that has room takes at once."""
_PATIENCE_MS = 100
"""For somebody who is about to read on; once each time that a reader stands still."""


class Unheard:
    """A stream whose reader may go at any time: a terminal is closed, a pipe's other end dies, the
    disk that a log is on is full. Or it stands still: a terminal is paused, a pager shows its first
    page. What is then written is lost, and that is all: whoever writes is an event loop, and must
    not wait. Once it is read again a line says how many were lost.

    Without a ``stream`` it is the process's stderr, as it is then; there may be none.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._given = stream
        self._is_stuck = False
        self._lost_lines = 0

    @property
    def _stream(self) -> IO[str] | None:
        return sys.stderr if self._given is None else self._given

    def write(self, text: str) -> int:
        with _GONE:
            stream = self._stream
            if stream is None:
                return len(text)
            for at in range(0, len(text), _PIECE_CHARS):
                piece = text[at : at + _PIECE_CHARS]
                if self._has_room(stream):
                    self._tell_lost(stream)
                    stream.write(piece)
                    stream.flush()
                else:
                    self._lost_lines += piece.count("\n")
        return len(text)

    def _has_room(self, stream: IO[str]) -> bool:
        """Whether a write comes back at once."""
        try:
            descriptor = stream.fileno()
        except (AttributeError, OSError, ValueError):
            return True  # none of the system's
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        self._is_stuck = not poll.poll(0 if self._is_stuck else _PATIENCE_MS)
        return not self._is_stuck

    def _tell_lost(self, stream: IO[str]) -> None:
        if self._lost_lines:
            count, self._lost_lines = self._lost_lines, 0
            stream.write(f"... {count} lines are missing here: nobody read them\n")

    def flush(self) -> None:
        with _GONE:
            if self._stream is not None and not self._is_stuck:
                self._stream.flush()

    def isatty(self) -> bool:
        with _GONE:
            return self._stream is not None and self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
