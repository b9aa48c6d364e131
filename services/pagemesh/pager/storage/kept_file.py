"""Small files that outlive the pager, each replaced as a whole, and trusted only if intact.

    <pool folder>/<host>.pins      what operators have pinned in the pool beside it
                  <host>.holders   who may write to that pool (``holders``)
                  <host>.retired   what the disk tier still has to forget (``retired_notes``)

A file is a line with the XXH3 of what follows it, then JSON. A pager that dies while it writes
leaves the previous file. Nothing is fsynced: if the machine dies, a file may be lost or torn, and
is then not trusted. If a write fails, whoever asked for it is told, and ``mend`` retries it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta
from xxhash import xxh3_128_hexdigest

from pagemesh.pager.events import KeptPin
from pagemesh.runtime.logs import get_logger
from pagemesh.wire.cache_messages import PIN_TTL_S_MAX, PinName, RootName
from pagemesh.wire.errors import Busy
from pagemesh.wire.messages import U64
from pagemesh.wire.pool_format import PINS_SUFFIX

_log = get_logger(__name__)
_BYTES_MAX = 1 << 20
K = TypeVar("K")
_TtlMs = Annotated[int, Meta(ge=0, le=1_000 * PIN_TTL_S_MAX)]


class KeptFile(Generic[K]):
    """One such file, which holds a ``kind``."""

    def __init__(self, path: Path, kind: type[K]) -> None:
        self.path, self._kind = path, kind
        self._owed: K | None = None
        self.unkept: Busy | None = None
        """The error for whoever wrote the last value, if it is not in the file; None if it is."""

    def read(self) -> K | None:
        """The value in the file; None if there is none that can be trusted."""
        try:
            if self.path.is_fifo():  # opening it would wait for somebody who writes
                raise OSError("it is a pipe")
            with self.path.open("rb") as file:
                found = file.read(_BYTES_MAX + 1)
            check, _, body = found.partition(b"\n")
            if check == xxh3_128_hexdigest(body).encode():
                return msgspec.json.decode(body, type=self._kind)
            problem = "its checksum is wrong"
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            problem = str(error)
        _log.error("pager.file_damaged", path=str(self.path), why=problem)
        return None

    def write(self, value: K) -> None:
        """Replace the file's value. If that fails, ``unkept`` says why, and so does the log, once
        until it succeeds."""
        why = self.replace(value)
        if why:
            if self.unkept is None:
                _log.error(
                    "pager.file_not_written", path=str(self.path), why=why,
                    next="pins, unpins and invalidations are lost when this pager ends, unless "
                    "the file can be written before; make room there, or let the pager write "
                    "there",
                )  # fmt: skip
            self._owed, self.unkept = value, Busy(
                f"done, but a pager that is restarted does not know of it: {self.path}: {why}; "
                "make room there, or let this pager write there, and it will be saved"
            )  # fmt: skip
        else:
            self._owed = self.unkept = None

    def replace(self, value: K) -> str:
        """Replace the file's value, without a retry. Returns why it failed; empty if it did not."""
        body = msgspec.json.encode(value)
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            fresh.write_bytes(xxh3_128_hexdigest(body).encode() + b"\n" + body)
            fresh.replace(self.path)
        except OSError as error:
            return (error.strerror or type(error).__name__).lower()
        return ""

    def mend(self) -> None:
        """Retry a write that failed."""
        if self._owed is not None:
            self.write(self._owed)

    def is_there(self) -> bool:
        """Whether the file exists, intact or not. True if that cannot be told."""
        try:
            return self.path.exists()
        except OSError:
            return True

    def remove(self) -> None:
        """Remove the file."""
        self._owed = self.unkept = None
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            _log.error(
                "pager.file_not_removed", path=str(self.path), why=error.strerror,
                next="remove it, or the next pager repeats an invalidation that is done",
            )  # fmt: skip


class _PinLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: PinName
    root: RootName
    identity: U64
    pages: Annotated[int, Meta(ge=1)]
    expires_in_ms: _TtlMs | None


class _PinLines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pool_incarnation: U64
    written_at_ms: int
    """Since 1970: no other clock survives a reboot. If it is set back, no time has passed."""
    pins: list[_PinLine]


class PinFile:
    """The pins in the pool of ``incarnation``, in a file beside it."""

    def __init__(
        self, pool: Path, incarnation: int, wall_ms: Callable[[], int] | None = None
    ) -> None:
        self._file = KeptFile(pool.with_suffix(PINS_SUFFIX), _PinLines)
        self._incarnation = incarnation
        self._wall_ms = wall_ms or _wall_ms

    def read(self) -> tuple[KeptPin, ...]:
        """The pins that have not expired, the oldest first."""
        found = self._file.read()
        if found is None or found.pool_incarnation != self._incarnation:
            return ()
        passed_ms = max(0, self._wall_ms() - found.written_at_ms)
        pins = [
            KeptPin(one.name, bytes.fromhex(one.root), one.identity, one.pages, one.expires_in_ms)
            for one in found.pins
        ]
        return tuple(left for pin in pins if not (left := pin.after(passed_ms)).is_over)

    def write(self, pins: tuple[KeptPin, ...]) -> None:
        """Replace the pins in the file."""
        lines = [
            _PinLine(one.name, one.root.hex(), one.identity, one.pages, one.expires_in_ms)
            for one in pins
        ]
        self._file.write(_PinLines(self._incarnation, self._wall_ms(), lines))

    @property
    def unkept(self) -> Busy | None:
        """Why the current pins are not in the file; None if they are."""
        return self._file.unkept

    def mend(self) -> None:
        """Retry a write that failed, with the time of the first attempt."""
        self._file.mend()


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
