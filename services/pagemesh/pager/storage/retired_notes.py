"""Roots that were invalidated, remembered until the disk tier has forgotten their pages.

    <pool folder>/<host>.retired         what the disk has to forget
    <disk folder>/<host>.disk.retired    the same: either may be lost, or impossible to write

Both are read when the disk is opened; what either says counts. A torn file counts as saying that
everything has to be forgotten, since nobody knows what it said. Only the one beside the disk lasts
as long as the pages that are to be forgotten: the pool's folder is empty after a reboot.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pagemesh.pager.storage.disk_file import DiskPlace
from pagemesh.pager.storage.kept_file import KeptFile
from pagemesh.pager.tiers.tier_events import RETIRED_ROOTS_MAX, RememberRetired, RetiredRoots
from pagemesh.runtime.lone_thread import LoneThread
from pagemesh.wire.cache_messages import RootName
from pagemesh.wire.errors import Busy
from pagemesh.wire.pool_format import RETIRED_SUFFIX

KEEP_S_MAX = 2.0
"""How long the pager waits for a note to be written: a folder may not answer at all."""
CLOSE_S_MAX = 5.0
"""How long it waits at the end for notes that took longer than that."""


class _Lines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    everything: bool
    roots: Annotated[list[RootName], Meta(max_length=RETIRED_ROOTS_MAX)]


class RetiredNotes:
    """The notes of one host. May be used by several threads."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """``paths``: a note counts as kept once it is in the last of them."""
        self._files = [KeptFile(path, _Lines) for path in paths]
        self._heard: set[KeptFile[_Lines]] = set()
        """Those that were read, or written by us. Others may yet appear, with an earlier pager's
        note: the disk's folder may be mounted late."""
        self._lock = threading.Lock()
        self._thread = LoneThread("pager-notes")
        self._late: set[asyncio.Future[None]] = set()
        """Writes that took too long to be waited for, and are not done yet."""
        self._numbers: dict[int, RetiredRoots] = {}
        """What was added in this life, by number, and what was there before it, as number 0."""

    @classmethod
    def beside(cls, folder: Path, host: str, disk: DiskPlace | None) -> RetiredNotes:
        """The notes of ``host``."""
        paths = [folder / f"{host}{RETIRED_SUFFIX}"]
        if disk is not None:
            paths.append(disk.folder / f"{host}.disk{RETIRED_SUFFIX}")
        return cls(paths)

    def read(self) -> RetiredRoots:
        """Everything that is to be forgotten. From now on it counts as from before this life."""
        with self._lock:
            self._load()
            self._numbers = {0: self._sum()}
            return self._numbers[0]

    @property
    def unkept(self) -> Busy | None:
        """The error for whoever invalidated something last, if the file that must have the note
        does not; None if it does."""
        file = self._files[-1]
        if self._late:
            return Busy(
                f"done, but a pager that is restarted may not know of it: {file.path.parent} "
                "does not answer; once it does, it will be saved"
            )
        return file.unkept

    async def mend(self) -> None:
        """Retry writes that failed, as far as that is possible now."""
        if self._owing() and not self._late:
            await self._in_time(self._try_again)

    def _try_again(self) -> None:
        with self._lock:
            owing = self._owing()
            self._load()
            self._write(owing)

    def _owing(self) -> list[KeptFile[_Lines]]:
        return [file for file in self._files if file.unkept is not None]

    async def keep(self, command: RememberRetired) -> None:
        """``add``, waiting ``KEEP_S_MAX`` at most; ``unkept`` tells if it is not done then."""
        await self._in_time(partial(self.add, command))

    async def _in_time(self, work: Callable[[], None]) -> None:
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        await asyncio.wait([done], timeout=0 if self._late else KEEP_S_MAX)
        if done.done():
            done.result()
        else:
            self._late.add(done)
            done.add_done_callback(self._late.discard)

    async def close(self) -> None:
        """Wait for what is not written yet, for ``CLOSE_S_MAX`` at most."""
        if self._late:
            await asyncio.wait(self._late, timeout=CLOSE_S_MAX)
        self._thread.shutdown(wait=False)

    def add(self, command: RememberRetired) -> None:
        """Remember what ``command`` says, too."""
        with self._lock:
            self._load()
            number = command.number  # an earlier pool's core may have used it: each begins with 1
            self._numbers[number] = self._numbers.get(number, RetiredRoots()) | command.retired
            if len(self._numbers) > RETIRED_ROOTS_MAX:
                self._numbers = {number: self._sum()}
            self._write(self._files)

    def forget(self, number: int) -> None:
        """The disk has nothing left of what was added up to ``number``, or before this life."""
        with self._lock:
            self._load()
            self._numbers = {at: one for at, one in self._numbers.items() if at > number}
            self._write(self._files)

    def _load(self) -> None:
        """Read files that were not read yet; what they say counts as from before this life."""
        found = self._numbers.get(0, RetiredRoots())
        for file in self._files:
            if file in self._heard:
                continue
            lines = file.read()
            if lines is not None:
                roots = frozenset(map(bytes.fromhex, lines.roots))
                found |= RetiredRoots(roots, lines.everything)
            elif file.is_there():
                found |= RetiredRoots(everything=True)
            else:
                continue
            self._heard.add(file)
        self._numbers[0] = found

    def _sum(self) -> RetiredRoots:
        total = RetiredRoots()
        for one in self._numbers.values():
            total |= one
        return total

    def _write(self, files: list[KeptFile[_Lines]]) -> None:
        total = self._sum()
        lines = _Lines(total.everything, sorted(root.hex() for root in total.roots))
        for file in files:
            if total:
                file.write(lines)
            else:
                file.remove()
            if file.unkept is None:
                self._heard.add(file)
