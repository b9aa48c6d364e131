"""Output for readers that may have gone, or may have stopped reading."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

_GONE = contextlib.suppress(OSError, ValueError)
"""A stream that was closed raises ``ValueError``."""
_PIECE_CHARS = 1_000
"""Under 4,096 bytes even with a line before them, which a pipe with room takes as a whole."""
_PATIENCE_MS = 100
"""Time to let a reader catch up, once each time that it stops reading."""


class Unheard:
    """A stream whose reader may go at any time: a terminal is closed, a pipe's other end dies, the
    disk of a log is full. Or the reader stops: a terminal is paused, ``less`` shows its first page.
    What is then written is lost, with no other effect, because the writer is an event loop and
    must not wait. Once it is read again, a line says how many lines were lost.

    Without a ``stream`` it writes to ``sys.stderr`` as it is at that moment, which may be None.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._given = stream
        self._is_stuck = False
        self._lost_lines = 0
        self._is_cut = False
        """The last line that was written is missing its end."""

    @property
    def _stream(self) -> IO[str] | None:
        return sys.stderr if self._given is None else self._given

    def write(self, text: str) -> int:
        with _GONE:
            stream = self._stream
            if stream is None:
                return len(text)
            with _terminal_of(stream) as terminal:
                for at in range(0, len(text), _PIECE_CHARS):
                    self._write_piece(stream, terminal, text[at : at + _PIECE_CHARS])
        return len(text)

    def _write_piece(self, stream: IO[str], terminal: int | None, piece: str) -> None:
        if not self._has_room(stream if terminal is None else terminal):
            self._lost_lines += piece.count("\n")
            return
        begun = "\n" if self._is_cut else ""
        if self._lost_lines:
            begun += f"... {self._lost_lines} lines are missing here: nobody read them\n"
        if terminal is None:
            stream.write(begun + piece)
            stream.flush()
            self._lost_lines, self._is_cut = 0, False
            return
        data = (begun + piece).encode(getattr(stream, "encoding", "utf-8"), "backslashreplace")
        left = self._left_of(terminal, data)
        if len(left) < len(data):
            self._lost_lines, self._is_cut = left.removeprefix(b"\n").count(b"\n"), bool(left)
        else:
            self._lost_lines += piece.count("\n")
        self._is_stuck = bool(left)

    def _left_of(self, terminal: int, data: bytes) -> bytes:
        """What a terminal does not take of ``data``. One that has room does not say how much."""
        until = time.monotonic() + _PATIENCE_MS / 1_000
        while data and self._has_room(terminal):
            try:
                data = data[os.write(terminal, data) :]
            except BlockingIOError:  # there is room for one of the two bytes that end a line
                break
            if time.monotonic() > until:
                break
        return data

    def _has_room(self, file: IO[str] | int) -> bool:
        """Whether a write returns at once."""
        try:
            descriptor = file if isinstance(file, int) else file.fileno()
        except (AttributeError, OSError, ValueError):
            return True  # not a file of the operating system
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        self._is_stuck = not poll.poll(0 if self._is_stuck else _PATIENCE_MS)
        return not self._is_stuck

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


@contextlib.contextmanager
def _terminal_of(stream: IO[str]) -> Iterator[int | None]:
    """A non-blocking descriptor of our own for the terminal that ``stream`` is, if it is one, where
    a write to ``stream`` would wait. (Making ``stream``'s own descriptor non-blocking would affect
    all processes that share it, the user's shell among them.)"""
    opened = None
    with _GONE, contextlib.suppress(AttributeError):
        if stream.isatty():
            mode = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            opened = os.open(os.ttyname(stream.fileno()), mode)
    try:
        yield opened
    finally:
        if opened is not None:
            os.close(opened)
