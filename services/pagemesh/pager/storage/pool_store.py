"""The pager's side of the pool file: made or taken over, scanned, written to.

    <pool folder>/<host>.pool       superblock, roots, lease words, headers, pages (unless they
                                    are on a device)
                  <host>.holders    which lock proves that a worker incarnation lives
                  <host>.pins       what operators have pinned in it (``kept_file``)
                  <lock name>.lock  each worker incarnation's own

The file outlives the pager; the epoch in its superblock is bumped before the first grant of each
life. Times in headers are host times (``runtime.clock``); the core knows only its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagemesh.kernels.native.header_writer import HeaderWriter
from pagemesh.kernels.native.headers import HeaderBatch, HeaderScan
from pagemesh.kernels.native.pool_file import PoolFile
from pagemesh.kernels.native.superblock import Superblock
from pagemesh.pager.events import (
    Command,
    HeaderTable,
    Holder,
    KeepUntil,
    Recovered,
    RootEntry,
    SetLeaseWord,
    SetStates,
    StorePins,
    StoreRoot,
    WriteHeaders,
)
from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.pages.runs import Pages, Run, pack_runs
from pagemesh.pager.storage.kept_file import PinFile
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.runtime.clock import HostTime
from pagemesh.runtime.ids import new_incarnation
from pagemesh.wire.errors import Busy, NoCapacity
from pagemesh.wire.pager_messages import PoolSpec
from pagemesh.wire.pool_format import (
    LEASE_SLOT_COUNT_MAX,
    POOL_SUFFIX,
    UNTIL_FOREVER_MS,
    HeaderState,
    PoolFormat,
)
from pagemesh.wire.tokens import pack_extents


class PoolStore:
    """One pool, from the bump of its epoch on. Made by ``create`` and ``adopt``."""

    def __init__(self, file: PoolFile, host: str, time: HostTime) -> None:
        self.file = file
        self._time = time
        self.facts = _facts(file, host, file.bump_epoch())
        self._writer = HeaderWriter(file.headers)
        self._pins = PinFile(file.path, self.facts.incarnation)

    @staticmethod
    def path_of(folder: Path, host: str) -> Path:
        return folder / f"{host}{POOL_SUFFIX}"

    @classmethod
    def create(cls, folder: Path, host: str, spec: PoolSpec, pool_bytes: int) -> PoolStore:
        """A new pool in place of an existing one, which is removed first: there may be no room for
        both. Raises ``NoCapacity`` if ``pool_bytes`` hold no page, ``ConfigError`` if the file
        cannot be made."""
        count = pool_bytes // spec.page_bytes
        if not count:
            raise NoCapacity(
                f"PAGEMESH_POOL_BYTES={pool_bytes} holds no page of {spec.page_bytes} bytes"
            )
        form = PoolFormat(count, spec.page_size, spec.page_bytes, spec.place)
        superblock = Superblock(form, new_incarnation(), spec.layout_digest, spec.group)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = cls.path_of(folder, host)
        with contextlib.suppress(OSError):  # ``create`` fails for the same reason, and says so
            path.unlink(missing_ok=True)
        file, time = PoolFile.create(path, superblock, epoch=superblock.first_epoch), HostTime()
        file.store_boot(time.boot)
        return cls(file, host, time)

    @classmethod
    def adopt(cls, folder: Path, host: str, time: HostTime | None = None) -> PoolStore:
        """Take over the pool that an earlier pager left; ``recovered`` says what is in it. Raises
        ``ConfigError`` if it is missing, damaged or still served."""
        return cls(PoolFile.adopt(cls.path_of(folder, host)), host, time or HostTime())

    def close(self) -> None:
        """Let go of the lock; the file stays for the next pager."""
        self.file.close()

    def perform(self, command: Command) -> bool:
        """Write what ``command`` says, if it concerns the file; True when it did."""
        perform = _PERFORMERS.get(type(command))
        if perform is None:
            return False
        perform(self, command)
        return True

    def _write_headers(self, command: WriteHeaders) -> None:
        self._writer.write(
            _page_list(command.pages), command.state, command.sequences, writer=command.writer,
            root=command.root, first_identity=command.first_identity, parent=command.parent,
            tokens=command.tokens,
            until_ms=0 if command.until_ms >= FOREVER_MS else self._time.kept_ms(command.until_ms),
        )  # fmt: skip

    def _set_states(self, command: SetStates) -> None:
        self._writer.mark(_page_list(command.pages), command.state, command.sequences)

    def _keep_until(self, command: KeepUntil) -> None:
        forever = command.until_ms >= FOREVER_MS
        until_ms = UNTIL_FOREVER_MS if forever else self._time.kept_ms(command.until_ms)
        self._writer.keep(_page_list(command.pages), until_ms)

    def _set_lease_word(self, command: SetLeaseWord) -> None:
        self.file.headers.set_lease_word(command.slot, command.value)

    def _store_root(self, command: StoreRoot) -> None:
        self.file.headers.store_root(command.index, command.digest, live=command.live)

    def _store_pins(self, command: StorePins) -> None:
        self._pins.write(command.pins)

    @property
    def unkept_pins(self) -> Busy | None:
        """Why the next pager would not know of the current pins; None if it would."""
        return self._pins.unkept

    def mend(self) -> None:
        """Retry a write of pins that failed."""
        self._pins.mend()

    def scan(self) -> HeaderScan:
        """A copy of all headers. It reads the file and nothing else, so any thread may call it."""
        return self.file.headers.scan()

    def recovered(self, scan: HeaderScan, holders: tuple[Holder, ...]) -> Recovered:
        """What is in the file and beside it, for the core. ``holders``: those that are alive."""
        batch = scan.batch
        # Headers with numbers that no earlier pager can have used are damaged, too.
        newest = np.uint64(self.facts.first_sequence)
        is_free = batch.states == HeaderState.FREE
        is_known = (batch.sequences <= newest) & (is_free | (batch.identities <= newest))
        states = batch.states.copy()
        states[scan.torn | ~is_known] = HeaderState.INVALID
        is_believed = (states != HeaderState.INVALID) & ~is_free
        until_ms = self._until_ms(batch, states)
        offset = self.file.superblock.form.revocation_offset
        words = self.file.headers.mapped[offset : offset + 8 * LEASE_SLOT_COUNT_MAX]
        roots = tuple(
            RootEntry(index, root.digest, root.live)
            for index, root in sorted(self.file.headers.roots().items())
        )
        table = HeaderTable(
            states, np.minimum(batch.sequences, newest),
            np.where(is_believed, batch.identities, np.uint64(0)), batch.parents, batch.writers,
            batch.roots, batch.counts, batch.tokens, until_ms,
        )  # fmt: skip
        words_copy = words.view(np.uint64).copy()
        return Recovered(table, roots, words_copy, holders, self._pins.read())

    def _until_ms(self, batch: HeaderBatch, states: NDArray[np.uint8]) -> NDArray[np.int64]:
        """When pages expire, in the core's time. If the times were written by other clocks, cached
        pages with an end are made INVALID, since nobody knows whether they have expired. If the
        machine was restarted since, all cached pages are: on a file system on disk, a header may
        have been saved and its page not."""
        is_cached = states == HeaderState.COMMITTED
        ends = (batch.until_ms != 0) & is_cached
        if self.file.boot != self._time.boot:
            # Before our boot is stored: if this pager dies in between, the next one does it again.
            is_lost = self._time.has_restarted(self.file.boot)
            pages = np.flatnonzero(is_cached if is_lost else ends)
            sequences = batch.sequences[pages].tobytes()
            self._writer.mark(pack_extents(batch.pages[pages]), HeaderState.INVALID, sequences)
            states[pages] = HeaderState.INVALID
            self.file.store_boot(self._time.boot)
        until_ms = np.full(len(states), FOREVER_MS)
        ends &= batch.until_ms < UNTIL_FOREVER_MS
        until_ms[ends] = self._time.clock_ms(0) + batch.until_ms[ends].astype(np.int64)
        return until_ms


_PERFORMERS: dict[type, Callable[[PoolStore, Any], None]] = {
    WriteHeaders: PoolStore._write_headers,
    SetStates: PoolStore._set_states,
    KeepUntil: PoolStore._keep_until,
    SetLeaseWord: PoolStore._set_lease_word,
    StoreRoot: PoolStore._store_root,
    StorePins: PoolStore._store_pins,
}
"""Unbound methods, so that no reference cycle delays the freeing of a store and its mapping."""


def _page_list(pages: Pages) -> Run | bytes:
    """``pages`` as a header writer takes them."""
    return pages if isinstance(pages, Run) else pack_runs([pages])


def _facts(file: PoolFile, host: str, epoch: int) -> PoolFacts:
    superblock = file.superblock
    return PoolFacts(
        host=host,
        epoch=epoch,
        incarnation=superblock.incarnation,
        page_count=superblock.form.page_count,
        page_size=superblock.form.page_size,
        page_bytes=superblock.form.page_bytes,
        layout_digest=superblock.layout_digest,
        path=str(file.path),
        group=superblock.group,
        place=superblock.place,
    )
