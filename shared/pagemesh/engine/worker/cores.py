"""How many cores a step may use, where several workers of a host compute.

Each worker keeps a few words in its own lock file, which every worker of the pool folder maps:

    0   ns    when the running step began; 0: none runs
    8   ns    when the last step ended
    16  bits  the cores that the process may use, 1,024 of them

Before each step a worker looks who computes, or did a moment ago, on cores that it may use too,
and takes its share of them: all of them when the others are idle. Threads of two processes that
take turns on one core wait for each other's time slices at every barrier of a step.

The words are hints. They are read without a lock, and a wrong one costs time and nothing else.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from pagemesh.kernels.native.locks import holder_is_dead
from pagemesh.wire.errors import ConfigError
from pagemesh.wire.pool_format import LOCK_SUFFIX

LOCK_PREFIX = "worker-"
"""Names of workers' lock files begin with it."""
LINGER_NS = 5_000_000
"""Who computed so recently counts as computing: its next step is being planned."""
SCAN_NS = 200_000_000
"""How often the folder is looked through for other workers."""
STUCK_NS = 1_000_000_000
"""A step that takes so long may be that of a process that was killed: its lock tells."""
WORKERS_MAX = 256
_CORES_MAX = 1_024
_STARTED, _ENDED, _CORES = 0, 1, 2
_WORDS = _CORES + _CORES_MAX // 64
_BYTES = 8 * _WORDS


class Cores(Protocol):
    """What the step thread asks before it computes."""

    def enter(self) -> int:
        """A step begins; the threads it may use, at least one."""
        ...

    def leave(self) -> None:
        """The step is over."""
        ...

    def close(self) -> None: ...


class FixedCores:
    """The same number of threads for every step."""

    def __init__(self, thread_count: int) -> None:
        self._thread_count = thread_count

    def enter(self) -> int:
        return self._thread_count

    def leave(self) -> None: ...

    def close(self) -> None: ...


def share_of(core_count: int, rank: int, worker_count: int) -> int:
    """The cores of the worker of ``rank`` among ``worker_count``, which share ``core_count`` as
    evenly as they can, the first ones getting what is left over; never none."""
    whole, over = divmod(core_count, worker_count)
    return max(1, whole + (rank < over))


class SharedCores:
    """``path``: the lock file of this worker, which exists; ``cores``: those it may use.

    Raises ``ConfigError`` when the folder has no room.
    """

    def __init__(self, path: Path, cores: Iterable[int], now_ns: Callable[[], int]) -> None:
        self._path = path
        self._now_ns = now_ns
        mask = _mask(cores)
        self._core_count = mask.bit_count()
        try:
            with path.open("r+b") as file:
                # Written, not only made longer: a page that has no memory would fault later.
                file.write(struct.pack("<QQ", 0, 0) + mask.to_bytes(_CORES_MAX // 8, "little"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; make room in PAGEMESH_POOL_DIR") from None
        self._own = _Words(path)
        self._others: dict[str, _Words] = {}
        self._scanned_ns = now_ns() - SCAN_NS

    def enter(self) -> int:
        now_ns = self._now_ns()
        if now_ns - self._scanned_ns >= SCAN_NS:
            self._scanned_ns = now_ns
            self._scan(now_ns)
        computing = [
            name
            for name, words in self._others.items()
            if words.mask & self._own.mask and words.is_computing(now_ns)
        ]
        self._own.words[_STARTED] = now_ns
        rank = sum(name < self._path.name for name in computing)
        return share_of(self._core_count, rank, 1 + len(computing))

    def leave(self) -> None:
        self._own.words[_ENDED] = self._now_ns()
        self._own.words[_STARTED] = 0

    def close(self) -> None:
        """Let go of all words."""
        for words in (self._own, *self._others.values()):
            words.close()
        self._others.clear()

    def _scan(self, now_ns: int) -> None:
        """Find workers that came; forget those that went, or died in a step."""
        try:
            entries = list(os.scandir(self._path.parent))
        except OSError:
            return  # the folder was removed: those who mapped their words still share the cores
        found = {
            entry.name: Path(entry.path)
            for entry in entries
            if entry.name.startswith(LOCK_PREFIX)
            and entry.name.endswith(LOCK_SUFFIX)
            and entry.name != self._path.name
        }
        for name in [name for name in self._others if name not in found]:
            self._others.pop(name).close()
        for name, path in found.items():
            words = self._others.get(name)
            if words is not None and words.is_stuck(now_ns) and holder_is_dead(path):
                # Its file may stay; a worker that starts anew has another.
                words.gone = True
            if words is None and len(self._others) < WORKERS_MAX:
                try:
                    self._others[name] = _Words(path)
                except (OSError, ValueError):
                    continue  # it went, or has written nothing yet


class _Words:
    """What one worker says. Raises ``OSError``, or ``ValueError`` when it said nothing yet."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self.words = memoryview(self._map).cast("Q")
        self.mask = int.from_bytes(self._map[8 * _CORES : _BYTES], "little")
        self.gone = False

    def is_computing(self, now_ns: int) -> bool:
        if self.gone:
            return False
        return bool(self.words[_STARTED]) or now_ns - self.words[_ENDED] < LINGER_NS

    def is_stuck(self, now_ns: int) -> bool:
        started_ns = self.words[_STARTED]
        return not self.gone and bool(started_ns) and now_ns - started_ns > STUCK_NS

    def close(self) -> None:
        self.words.release()
        self._map.close()


def _mask(cores: Iterable[int]) -> int:
    mask = 0
    for core in cores:
        if core < _CORES_MAX:
            mask |= 1 << core
    return mask
