"""Which workers live: the locks of their incarnations, and a list of these that outlives the pager.

Each incarnation keeps a file of its own locked; the kernel frees the lock when the process dies,
and at no other time. Which file belongs to which incarnation is written down before a session is
confirmed, so that a new pager knows who may use the pool. Only the pager removes the file of a
worker that was killed.

The list is written before its pool is made, and a pool without an intact list is not taken over
(``load``, under the pool's lock): workers that nobody knows of may be using its pages.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pagemesh.kernels.native.locks import holder_is_dead, is_at, is_free, open_lock
from pagemesh.pager.events import Holder
from pagemesh.pager.storage.kept_file import KeptFile
from pagemesh.runtime.logs import get_logger
from pagemesh.wire.errors import Busy, Denied
from pagemesh.wire.messages import U64, Name
from pagemesh.wire.pool_format import HOLDERS_SUFFIX, LOCK_PREFIX, LOCK_SUFFIX, MEMORY_SUFFIX

_AGAIN_MS = 1_000
_YOUNG_S = 60.0
"""The file of a lock that is younger than this may be about to be locked."""
_TURNED_AWAY_MAX = 256
_ONE_FOLDER = (
    "give the worker and its pager the same PAGEMESH_POOL_DIR, on the same mount; workers of "
    "another machine need a pager there, and another host name (--host)"
)
_log = get_logger(__name__)


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    incarnation: U64
    worker: Name
    lock_name: Name


class _Lines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    holders: list[_Line]


class Holders:
    """The incarnations that may use the pool, as listed in ``<host>.holders``."""

    def __init__(
        self, folder: Path, host: str, has_exited: Callable[[str], bool] = lambda _name: True
    ) -> None:
        """``has_exited``: whether the process behind a lock that is free has exited completely."""
        self._has_exited = has_exited
        self._folder = folder
        self.path = folder / f"{host}{HOLDERS_SUFFIX}"
        self._file = KeptFile(self.path, _Lines)
        self._known: dict[int, Holder] = {}
        self._locks: dict[int, int] = {}
        """Their lock files, kept open: one that is removed still tells whether its holder lives."""
        self._unfound: set[int] = set()
        """Those to be killed whose process was not found, which is logged once."""
        self._turned_away: set[str] = set()
        """Workers whose lock is not held, as logged."""
        self._written: frozenset[Holder] = frozenset()
        self._refused_why = ""
        """Why the list could not be written last time, as logged."""
        self.load()

    def load(self) -> bool:
        """Add the holders that an earlier pager wrote down. False: the list is damaged or missing,
        and nobody knows who may use the pool."""
        found = self._file.read()
        self._written = frozenset(
            Holder(one.incarnation, one.worker, one.lock_name)
            for one in (found.holders if found is not None else ())
        )
        for holder in self._written:
            self._know(holder)
        return found is not None

    def living(self) -> tuple[Holder, ...]:
        """Those that are not dead; the others are forgotten."""
        for holder in list(self._known.values()):
            if self.is_dead(holder.incarnation):
                self._forget(holder)
        return tuple(self._known.values())

    def remember(self, holder: Holder) -> Busy | None:
        """Write ``holder`` down for the next pager. If that fails, returns why: then no session of
        this holder may be confirmed."""
        if self._known.get(holder.incarnation) != holder:
            self._know(holder)
            self._remove_unknown()
        return None if holder in self._written else self.write()

    def forget(self, incarnation: int) -> None:
        """Drop a dead holder. If that cannot be written, its lock tells the next pager."""
        holder = self._known.get(incarnation)
        if holder is not None:
            self._forget(holder)
            self.write()

    def close(self) -> None:
        """Close all files."""
        for incarnation in list(self._known):
            self._leave(incarnation)

    def _know(self, holder: Holder) -> None:
        self._leave(holder.incarnation)
        self._known[holder.incarnation] = holder
        with contextlib.suppress(FileNotFoundError):
            self._locks[holder.incarnation] = open_lock(self._lock_path(holder.lock_name))

    def _forget(self, holder: Holder) -> None:
        """Take ``holder`` off the list in memory; if it is dead, remove its files."""
        lock, path = self._locks.get(holder.incarnation), self._lock_path(holder.lock_name)
        # A file of that name may be another worker's by now, which would end without it.
        if lock is not None and self.is_dead(holder.incarnation) and is_at(path, lock):
            for left in (path, path.with_suffix(MEMORY_SUFFIX)):
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)
        self._leave(holder.incarnation)

    def _remove_unknown(self) -> None:
        """Remove the files of workers that were killed before they opened a session."""
        known = {self._lock_path(holder.lock_name) for holder in self._known.values()}
        for path in set(self._folder.glob(f"{LOCK_PREFIX}*{LOCK_SUFFIX}")) - known:
            with contextlib.suppress(OSError):
                is_old = time.time() - path.stat().st_mtime > _YOUNG_S
                if is_old and holder_is_dead(path) and not path.with_suffix(MEMORY_SUFFIX).exists():
                    path.unlink()

    def _leave(self, incarnation: int) -> None:
        self._known.pop(incarnation, None)
        self._unfound.discard(incarnation)
        lock = self._locks.pop(incarnation, None)
        if lock is not None:
            os.close(lock)

    def is_dead(self, incarnation: int) -> bool:
        """Whether the incarnation's lock is free and its process gone, or it is not known."""
        holder = self._known.get(incarnation)
        if holder is None:
            return True
        lock = self._locks.get(incarnation)
        free = is_free(lock) if lock is not None else not self.is_locked(holder.lock_name)
        return free and self._has_exited(holder.lock_name)

    def is_locked(self, lock_name: str) -> bool:
        return not holder_is_dead(self._lock_path(lock_name))

    def check_lock(self, worker: str, lock_name: str) -> None:
        """Raises ``Denied`` unless ``lock_name`` is held. That is logged once per worker, which
        asks again for ever."""
        if self.is_locked(lock_name):
            self._turned_away.discard(worker)
            return
        if worker not in self._turned_away:
            if len(self._turned_away) >= _TURNED_AWAY_MAX:
                self._turned_away.clear()
            self._turned_away.add(worker)
            _log.warning(
                "pager.worker_turned_away", worker=worker, lock=lock_name,
                reason=f"its lock is not held in {self._folder}", next=_ONE_FOLDER,
            )  # fmt: skip
        raise Denied(
            f"the lock {lock_name} is not held in {self._folder}, the pager's pool folder: "
            f"{_ONE_FOLDER}"
        )

    def lock_name(self, incarnation: int) -> str | None:
        """The name of the incarnation's lock; None if it is not known."""
        holder = self._known.get(incarnation)
        return None if holder is None else holder.lock_name

    def owner(self, lock_name: str) -> int:
        """The id of the process that holds the lock; 0 if none can be seen."""
        try:
            return lock_owner(self._lock_path(lock_name).stat())
        except OSError:
            return 0

    def replaced_by(self, lock_name: str, incarnation: int) -> list[int]:
        """Other incarnations known under a lock that ``incarnation`` holds now: each must have
        died, since a lock has one holder."""
        return [
            holder.incarnation
            for holder in self._known.values()
            if holder.lock_name == lock_name and holder.incarnation != incarnation
        ]

    def kill(self, incarnation: int) -> bool:
        """SIGKILL the process that holds the incarnation's lock, if it can be found."""
        holder = self._known.get(incarnation)
        lock = self._locks.get(incarnation)
        pid = lock_owner(os.fstat(lock)) if lock is not None else 0
        if not pid:
            self._tell_unfound(incarnation)
        if pid <= 1 or pid == os.getpid():
            return False
        _log.warning(
            "pager.kills_holder", worker=holder.worker if holder else "", pid=pid,
            reason="it was told to release pages that others wait for, and did not",
        )  # fmt: skip
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            return True
        return False

    def _tell_unfound(self, incarnation: int) -> None:
        holder = self._known.get(incarnation)
        if holder is None or incarnation in self._unfound or self.is_dead(incarnation):
            return
        self._unfound.add(incarnation)
        _log.warning(
            "pager.holder_not_found", worker=holder.worker, lock=holder.lock_name,
            reason="it must be killed, but /proc/locks names no process, or several, for its "
            "lock",
            next="end that worker yourself; put PAGEMESH_POOL_DIR on a tmpfs, since for files "
            "on btrfs and overlayfs /proc/locks may name another device than stat does",
        )  # fmt: skip

    def _lock_path(self, lock_name: str) -> Path:
        return self._folder / f"{lock_name}{LOCK_SUFFIX}"

    def write(self) -> Busy | None:
        """Write the current list. If that fails, returns why."""
        known = self._known.values()
        lines = [_Line(one.incarnation, one.worker, one.lock_name) for one in known]
        why = self._file.replace(_Lines(lines))
        if why:
            if why != self._refused_why:
                next_ = "make room in PAGEMESH_POOL_DIR; workers are told to retry"
                _log.error("pager.holders_not_written", path=str(self.path), why=why, next=next_)
            self._refused_why = why
            text = f"{self.path}: {why}; make room in PAGEMESH_POOL_DIR"
            return Busy(text, retry_after_ms=_AGAIN_MS)
        self._written, self._refused_why = frozenset(known), ""
        return None


def lock_owner(file: os.stat_result) -> int:
    """The process id that holds the lock of a file, 0 when nobody (visible) does."""
    try:
        return owner_in(Path("/proc/locks").read_text(), file)
    except OSError:
        return 0


def owner_in(locks: str, file: os.stat_result) -> int:
    """The one process that ``locks``, in the form of /proc/locks, names as the holder of ``file``;
    0 for none, or several. Devices are compared too, since inode numbers are unique only within a
    file system."""
    wanted = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    found = set()
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) < 6 or (fields[1], fields[3]) != ("FLOCK", "WRITE"):
            continue  # shared: by somebody who checks whether it is held
        if fields[5] == wanted:
            found.add(int(fields[4]))
    return max(0, found.pop()) if len(found) == 1 else 0
