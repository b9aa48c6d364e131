"""Turns of workers of one host that compute on the same cores.

A step may run on all cores of its worker, and workers whose cores overlap take turns, first come,
first served: threads of two steps on one core would wait for each other at every barrier of both.
Steps with fewer threads than cores take turns too, since their threads may run on any of the cores.
Each worker keeps a few words in its own lock file, which every worker of the pool folder maps:

    0   count  of changes of the other words; those who wait for one sleep on its low half
    8   ns     since when it waits for its turn; 0: it does not
    16  ns     when the running step began; 0: none runs
    24  ns     when the last step ended
    32  rows   that draw, of the last step
    40  us     that the last step took
    48  bits   the cores that the process may use, 1,024 of them

The words are hints, read without a lock: a wrong one costs only time. Nobody waits for a dead
worker, and nobody waits long for one that seems to be stuck.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from pagemesh.engine.worker.plan import NO_READERS, Readers
from pagemesh.kernels.native.library import library
from pagemesh.kernels.native.locks import is_free
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.pool_format import LOCK_PREFIX, LOCK_SUFFIX

LINGER_NS = 5_000_000
"""A worker that computed this recently counts as computing: its next step is being planned."""
SCAN_NS = 200_000_000
"""How often the folder is searched for other workers."""
PATIENCE_NS = 1_000_000_000
"""How long to wait for another worker, or ``PATIENCE_STEPS`` times its last step if longer."""
PATIENCE_STEPS = 4
DOUBT_US = 50_000
"""After this long without a change, check whether the other worker still lives."""
WORKERS_MAX = 256
_CORES_MAX = 1_024
_CHANGES, _WANTED, _STARTED, _ENDED, _ROWS, _TOOK_US, _CORES = range(7)
_WORDS = _CORES + _CORES_MAX // 64
_BYTES = 8 * _WORDS
_HALF_MASK = (1 << 32) - 1


class Turns(Protocol):
    """What the step thread asks before it computes."""

    @property
    def thread_count(self) -> int:
        """Threads that a step may use, at least one."""
        ...

    @property
    def cores(self) -> bytes:
        """Cores that steps take turns on, one bit each, little-endian; empty: no turns."""
        ...

    def enter(self, drawing_rows: int) -> Readers:
        """Wait until a step may begin. Returns the readers of workers that take turns with it."""
        ...

    def others_waiting(self) -> tuple[int, ...]:
        """Addresses of 64-bit words, one per other worker, that are 0 while it does not wait for
        the cores. Valid until ``leave``."""
        ...

    def is_wanted(self) -> bool:
        """Whether another worker waits for the cores."""
        ...

    def leave(self, step_count: int = 1) -> None:
        """``step_count`` steps have ended, one after another; 0: a step failed."""
        ...

    def close(self) -> None: ...


class NoTurns:
    """Steps begin at once, always with ``thread_count`` threads."""

    cores = b""

    def __init__(self, thread_count: int) -> None:
        self.thread_count = thread_count

    def enter(self, drawing_rows: int) -> Readers:
        return NO_READERS

    def others_waiting(self) -> tuple[int, ...]:
        return ()

    def is_wanted(self) -> bool:
        return False

    def leave(self, step_count: int = 1) -> None: ...

    def close(self) -> None: ...


class SharedTurns:
    """``path``: the lock file of this worker, which exists. ``cores``: all cores it may use, even
    if ``thread_count`` is smaller.

    Raises ``ConfigError`` when the folder has no room.
    """

    def __init__(
        self, path: Path, cores: Iterable[int], now_ns: Callable[[], int], thread_count: int
    ) -> None:
        self._now_ns = now_ns
        self.thread_count = thread_count
        mask = sum(1 << core for core in set(cores) if core < _CORES_MAX)
        self.cores = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
        try:
            with path.open("r+b") as file:
                # Written, not only extended: a page without memory behind it would fault later.
                head = struct.pack(f"<{_CORES}Q", *[0] * _CORES)
                file.write(head + mask.to_bytes(_CORES_MAX // 8, "little"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; make room in PAGEMESH_POOL_DIR") from None
        self._own = _Words(path)
        self._others: dict[str, _Words] = {}
        self._dead: set[str] = set()
        """Names of lock files of dead workers, until the pager removes them. Each incarnation has
        a file of its own."""
        self._scanned_ns = now_ns() - SCAN_NS

    def enter(self, drawing_rows: int) -> Readers:
        now_ns = self._now_ns()
        if now_ns - self._scanned_ns >= SCAN_NS:
            self._scanned_ns = now_ns
            self._scan()
        own = self._own
        own.words[_WANTED] = now_ns
        own.changed()
        for other in self._others.values():
            if other.mask & own.mask:
                self._wait_for(other, now_ns)
        began_ns = self._now_ns()
        readers = self._readers(began_ns)
        own.words[_ROWS] = drawing_rows
        own.words[_STARTED] = began_ns
        own.words[_WANTED] = 0
        own.changed()
        return readers

    def others_waiting(self) -> tuple[int, ...]:
        own = self._own
        return tuple(
            other.address_of(_WANTED)
            for other in self._others.values()
            if other.mask & own.mask and not other.waits_in_vain()
        )

    def is_wanted(self) -> bool:
        own = self._own
        return any(
            other.words[_WANTED] and other.mask & own.mask and not other.waits_in_vain()
            for other in self._others.values()
        )

    def leave(self, step_count: int = 1) -> None:
        own, now_ns = self._own, self._now_ns()
        took_us = (now_ns - own.words[_STARTED]) // 1_000
        own.words[_TOOK_US] = took_us // max(1, step_count)
        own.words[_ENDED] = now_ns
        own.words[_STARTED] = 0
        own.changed()

    def close(self) -> None:
        """Unmap all words; nobody waits for this worker any more."""
        self._own.words[_STARTED] = self._own.words[_WANTED] = 0
        self._own.changed()
        for words in (self._own, *self._others.values()):
            words.close()
        self._others.clear()

    def _wait_for(self, other: _Words, since_ns: int) -> None:
        """Wait while ``other`` computes or is ahead of this worker, which has waited since
        ``since_ns``; not for ever, and not if it is dead."""
        patience_ns = max(PATIENCE_NS, PATIENCE_STEPS * 1_000 * other.words[_TOOK_US])
        while True:
            seen = other.words[_CHANGES] & _HALF_MASK
            turn_ns = other.turn_before(since_ns, other.path.name < self._own.path.name)
            if not turn_ns or turn_ns == other.passed_ns:
                return
            if self._now_ns() - since_ns > patience_ns:
                other.passed_ns = turn_ns
                return
            other.wait(seen, DOUBT_US)
            if other.words[_CHANGES] & _HALF_MASK == seen and other.is_dead():
                other.passed_ns = turn_ns
                return

    def _readers(self, now_ns: int) -> Readers:
        rows, step_us = 0, 0
        for other in self._others.values():
            if other.mask & self._own.mask and other.words[_ROWS] and other.is_active(now_ns):
                rows += other.words[_ROWS]
                step_us += other.words[_TOOK_US]
        return Readers(rows, step_us)

    def _scan(self) -> None:
        """Find new workers and forget those that are gone."""
        try:
            entries = list(os.scandir(self._own.path.parent))
        except OSError:
            return  # the folder was removed: workers mapped before still take turns
        found = {
            entry.name: Path(entry.path)
            for entry in entries
            if entry.name.startswith(LOCK_PREFIX)
            and entry.name.endswith(LOCK_SUFFIX)
            and entry.name != self._own.path.name
        }
        self._dead &= found.keys()
        for name in [name for name, other in self._others.items() if other.is_dead()]:
            self._dead.add(name)
        for name in [name for name in self._others if name not in found or name in self._dead]:
            self._others.pop(name).close()
        for name, path in found.items():
            if name in self._others or name in self._dead or len(self._others) >= WORKERS_MAX:
                continue
            try:
                other = _Words(path)
            except (OSError, ValueError):
                continue  # it is gone, or has written nothing yet
            if other.is_dead():  # it held its lock when it wrote: it is not just starting
                self._dead.add(name)
                other.close()
            else:
                self._others[name] = other


class _Words:
    """The mapped words of one worker. Raises ``OSError`` if its file cannot be opened, and
    ``ValueError`` if it has written nothing yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(path.open("r+b"))
            self._map = mmap.mmap(self._file.fileno(), _BYTES)
            stack.pop_all()
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.words = memoryview(self._map).cast("Q")
        self.mask = int.from_bytes(self._map[8 * _CORES : _BYTES], "little")
        self.passed_ns = 0
        """The time of its turn that we stopped waiting for: that turn is passed over."""

    def address_of(self, word: int) -> int:
        return self._address + 8 * word

    def turn_before(self, since_ns: int, is_first: bool) -> int:
        """When its running step began, or since when it waits if that is before ``since_ns``
        (``is_first``: or the same); 0 if it need not be waited for."""
        started_ns, wanted_ns = self.words[_STARTED], self.words[_WANTED]
        if started_ns:
            return started_ns
        return wanted_ns if wanted_ns < since_ns + is_first else 0

    def waits_in_vain(self) -> bool:
        """Whether we have passed over its current turn, because it is dead or was stuck."""
        wanted_ns = self.words[_WANTED]
        return bool(wanted_ns) and wanted_ns == self.passed_ns

    def is_active(self, now_ns: int) -> bool:
        """Whether it computes, waits to, or is about to."""
        if self.words[_STARTED] or self.words[_WANTED]:
            return max(self.words[_STARTED], self.words[_WANTED]) != self.passed_ns
        return now_ns - self.words[_ENDED] < LINGER_NS

    def is_dead(self) -> bool:
        """Whether its process has ended, whether or not its file was removed. The pager removes
        files of the dead; if others remove that of a living worker, its turns still count."""
        return is_free(self._file.fileno())

    def changed(self) -> None:
        """Count a change, and wake those who wait for it."""
        library().pm_word_advance(self._address)

    def wait(self, seen: int, timeout_us: int) -> None:
        """Wait until the count is not ``seen`` any more, at most ``timeout_us``."""
        library().pm_word_await(self._address, seen, timeout_us)

    def close(self) -> None:
        self.words.release()
        self._map.close()
        self._file.close()
