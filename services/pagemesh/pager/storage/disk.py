"""The I/O of the disk tier: a thread that writes, one that reads, and the events they report.

    actor --take--> [ bytes copied ] --> writer --> PagesWritten ----+
                    could not copy   -------------> PagesNotTaken ---+
          --forget, skip---------------> writer                      |
          --load-----------------------> reader --> PagesLoaded -----+--> events for the core
                                         any of them: DiskFailed ----+
          --give up---------------------------------> DiskFailed ----'

The actor never waits for the disk: the writer performs what it is told, in order. At the end it has
a few seconds; what is not written by then is computed again. A thread that hangs does not keep the
process alive. The core bounds how much may wait to be written, and how much is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait

from pagemesh.kernels.native.locks import try_lock
from pagemesh.pager.limits import PagerLimits, PoolFacts
from pagemesh.pager.storage.disk_file import DiskFile, DiskPlace, Read
from pagemesh.pager.storage.page_bytes import Bytes, Filling, PageBytes
from pagemesh.pager.storage.plain_file import FileRemoved, Opener, PlainFile
from pagemesh.pager.storage.retired_notes import RetiredNotes
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.load import PAGER
from pagemesh.pager.tiers.tier_events import (
    DiskFailed,
    DiskFound,
    ForgetRetired,
    ForgetSlots,
    GiveUpDisk,
    LoadPages,
    PagesLoaded,
    PagesNotTaken,
    PagesWritten,
    SkipSlots,
    StorePages,
    TellDamaged,
    TierEvent,
)
from pagemesh.runtime.logs import get_logger
from pagemesh.runtime.lone_thread import LoneThread
from pagemesh.wire.errors import Fault

_log = get_logger(__name__)
_TOLD_AGAIN_S = 60.0
"""How often damaged pages, of which there may be many, are logged."""
CLOSE_S_MAX = 5.0
"""How long the writer may take to end, and after it the readers."""


def log_event(event: TierEvent) -> None:
    """Log what operators need to know of ``event``, if anything."""
    match event:
        case DiskFound(tier, dropped_count):
            _log.info(
                "pager.disk_found", slots=tier.slot_count, pages=tier.page_count,
                dropped=dropped_count,
            )  # fmt: skip
        case DiskFailed(why):
            _log.error(
                "pager.disk_off", why=why,
                next="serving continues without the disk tier; fix the cause, then restart the "
                "pager",
            )  # fmt: skip
        case _:
            pass


def remove_unused(place: DiskPlace) -> None:
    """Remove the files at ``place``, where there is no tier any more, unless they are locked."""
    for part in ("index", "pages"):
        path = place.path(part)
        with contextlib.suppress(OSError), path.open("rb") as file:
            if try_lock(file.fileno()):
                path.unlink()


class Disk:
    """The disk of one pager life. ``pages`` are those of the pool, closed with this; ``report`` is
    called on the event loop with each event, or with the exception that ended a thread's work."""

    def __init__(
        self,
        place: DiskPlace,
        facts: PoolFacts,
        limits: PagerLimits,
        pages: PageBytes,
        report: Callable[[TierEvent | BaseException], None],
        opener: Opener = PlainFile,
        *,
        retired: RetiredNotes,
    ) -> None:
        self._place, self._facts, self._opener = place, facts, opener
        self._staged_pages_max = limits.staged_pages_max(facts)
        self._retired = retired
        self._pages = pages
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._file: DiskFile | None = None
        self._closing = threading.Event()
        self._is_open = self._is_quiet = self._is_closed = False
        self._failed = threading.Event()
        self._writer = LoneThread("pager-disk-write")
        self._reader = LoneThread("pager-disk-read")
        self._filling: set[Future[list[TierEvent]]] = set()
        """Loads into a device, each on a thread of its own."""
        self._damaged_count = 0
        """Since the last time that was logged."""
        self._told_s = -math.inf

    # What the actor asks for

    async def perform(self, command: object) -> bool:
        """Do what ``command`` says, if it is one for the disk; True when it was."""
        match command:
            case StorePages():
                await self.take(command)
            case LoadPages():
                self.load(command)
            case ForgetSlots() | SkipSlots():
                self._forget(command)
            case TellDamaged(slot):
                self._tell_damaged(slot)
            case GiveUpDisk():
                self._give_up(command)
            case ForgetRetired(number):  # once all earlier writes are done
                self._start(self._writer, lambda: self._forget_retired(number))
            case _:
                return False
        return True

    @property
    def can_take(self) -> bool:
        """Whether the bytes of the pool can be reached at all."""
        return self._pages.can_take

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Within this context nobody else waits: copying bytes may take seconds."""
        self._pages.is_patient = True
        try:
            yield
        finally:
            self._pages.is_patient = False

    def open(self) -> None:
        """Find out what is there; ``DiskFound`` or ``DiskFailed`` is reported."""
        self._start(self._writer, self._open)

    async def take(self, command: StorePages) -> None:
        """Copy the pages' bytes, then have them written. Nobody may write into the pages before
        this returns."""
        try:
            taken = await self._pages.take(command.pages)
        except Fault:
            self._report(PagesNotTaken(command.slots))
        else:
            self._start(self._writer, lambda: self._store(command, taken))

    def load(self, command: LoadPages) -> None:
        """Read into pages of the pool; ``PagesLoaded`` is reported in any case."""
        filling = self._pages.filling(command.pages, command.mover)
        if command.mover == PAGER:
            self._start(self._reader, lambda: self._load(command, filling))
            return
        # A load that waits for a stalled worker must not hold up others.
        own = LoneThread("pager-disk-fill")
        future = own.submit(lambda: self._load(command, filling))
        future.add_done_callback(self._finished)
        own.shutdown(wait=False)
        self._filling = {future, *(one for one in self._filling if not one.done())}

    def _forget(self, command: ForgetSlots | SkipSlots) -> None:
        """Empty these slots, so that nothing is found there, once earlier commands are done."""
        file = self._file
        if file is None:
            return
        clear = file.forget
        if isinstance(command, SkipSlots):
            file.skip(command.slots)
            clear = file.empty
        self._start(self._writer, lambda: self._clear(command.slots, clear))

    def _tell_damaged(self, slot: int) -> None:
        self._damaged_count += 1
        now_s = time.monotonic()
        if now_s - self._told_s < _TOLD_AGAIN_S:
            return
        _log.error(
            "pager.disk_page_damaged", file=str(self._place.path("pages")), slot=slot,
            damaged=self._damaged_count,
            next="the page is recomputed; if this repeats, check the disk's health (kernel log, "
            "SMART) and what else writes to the folder",
        )  # fmt: skip
        self._damaged_count, self._told_s = 0, now_s

    def _give_up(self, command: GiveUpDisk) -> None:
        """Switch the disk off: too much was damaged."""
        events = self._off(
            f"{self._place.path('pages')}: {command.damaged_count} of the last "
            f"{command.load_count} reads found damaged pages; check the disk's health, and "
            "remove the file if something overwrote it"
        )
        for event in events:
            self._report(event)

    async def close(self) -> bool:
        """Write what was taken, stop reading, and close the files. False: a disk that does not
        answer may still be reading into the pool. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._pages.stop()
            self._is_quiet = await asyncio.to_thread(self._shut)
            if self._is_quiet:
                self._pages.close()
            self._is_closed = True
        return self._is_quiet

    def _start(self, thread: LoneThread, work: Callable[[], list[TierEvent]]) -> None:
        thread.submit(work).add_done_callback(self._finished)

    def _finished(self, future: Future[list[TierEvent]]) -> None:
        if future.cancelled() or self._is_closed:
            return
        error = future.exception()
        for event in [error] if error is not None else future.result():
            self._loop.call_soon_threadsafe(self._say, event)

    def _say(self, event: TierEvent | BaseException) -> None:
        """Report ``event``, unless this is closed: by then there may be another pool, whose core
        knows of nothing that this was asked for."""
        if not self._is_closed:
            self._report(event)

    # On the threads

    def _open(self) -> list[TierEvent]:
        try:
            self._file, found = DiskFile.open(self._place, self._facts, self._opener)
            tier = DiskTier(self._facts, found, self._staged_pages_max)
        except OSError as error:
            return self._fail(error)
        except MemoryError:
            return self._off(
                f"{self._place.folder}: there is no memory for the index of a tier of "
                f"{self._place.bytes_max / 2**30:,.0f} GiB; lower PAGEMESH_DISK_BYTES"
            )
        self._is_open = True
        return [DiskFound(tier, found.dropped_count, self._retired.read())]

    def _store(self, command: StorePages, taken: Bytes) -> list[TierEvent]:
        if self._file is None or self._failed.is_set():
            return []
        try:
            self._file.store(command, taken)
        except OSError as error:
            return self._fail(error)
        return [PagesWritten(command.slots)]

    def _load(self, command: LoadPages, filling: Filling) -> list[TierEvent]:
        began_ns = time.perf_counter_ns()
        read, settling_ns = Read(0, None), began_ns
        failed: list[TierEvent] = []
        if self._file is not None and not self._failed.is_set():
            try:
                read = self._file.load(command, filling.row, self._closing.is_set)
                settling_ns = time.perf_counter_ns()
                if not self._closing.is_set():
                    filling.settle(read.page_count)
            except OSError as error:
                failed = self._fail(error)
            except Fault as fault:
                _log.warning("pager.pages_not_filled", reason=fault.message)
        filling.close()
        ended_ns = time.perf_counter_ns()
        memory_count = min(read.memory_count, filling.settled)
        # Settling takes equally long for each page.
        of_memory = memory_count / max(1, filling.settled)
        memory_ns = read.memory_ns + int(of_memory * (ended_ns - settling_ns))
        return [
            PagesLoaded(
                command.load, filling.settled, (ended_ns - began_ns) // 1_000, read.bad_slot,
                memory_count, memory_ns // 1_000, read.is_other,
            ),
            *failed,
        ]  # fmt: skip

    def _clear(self, slots: Iterable[int], clear: Callable[[int], None]) -> list[TierEvent]:
        if self._failed.is_set():
            return []
        try:
            for slot in slots:
                clear(slot)
        except OSError as error:
            return self._fail(error)
        return []

    def _forget_retired(self, number: int) -> list[TierEvent]:
        if not self._failed.is_set():
            self._retired.forget(number)
        return []

    def _fail(self, error: OSError) -> list[TierEvent]:
        """The first failure switches the disk off: what cannot be relied on is not used."""
        if isinstance(error, FileRemoved) and not self._failed.is_set():
            _log.error(
                "pager.disk_removed", path=error.filename,
                next="the pages there are lost, and the disk tier is off until the pager is "
                "restarted; do not touch the files in PAGEMESH_DISK_DIR (with host memory alone, "
                "in PAGEMESH_POOL_DIR)",
            )  # fmt: skip
        reason = error.strerror or type(error).__name__
        place = error.filename or self._place.folder
        return self._off(f"{place}: {reason[:1].lower()}{reason[1:]}")

    def _off(self, why: str) -> list[TierEvent]:
        if self._failed.is_set():
            return []
        self._failed.set()
        return [DiskFailed(why)]

    def _shut(self) -> bool:
        """End the threads. Returns whether nobody reads into the pool any more. A thread that hangs
        is left alone, with its file open."""
        written = _ends(self._writer)
        if not written and self._is_open:
            _log.error(
                "pager.disk_does_not_answer", folder=str(self._place.folder),
                next="pages that were not written are recomputed; check the disk's health",
            )  # fmt: skip
        elif not written:  # nothing was to be written yet
            _log.info(
                "pager.disk_not_listed", folder=str(self._place.folder),
                next="a large tier takes its time; if it is small, check the disk's health",
            )  # fmt: skip
        read = _ends(self._reader, *self._filling)
        if self._file is not None and written and read:
            try:
                self._file.close()
            except OSError as error:  # nothing there is trusted without its checksum
                _log.warning("pager.disk_not_closed", error=error)
            self._file = None
        return read


def _ends(thread: LoneThread, *others: Future[list[TierEvent]]) -> bool:
    """End ``thread``. Returns whether it and ``others`` did what they were told, in time."""
    last = thread.submit(list[TierEvent])
    ended = wait({last, *others}, CLOSE_S_MAX)
    thread.shutdown(wait=False, cancel_futures=True)
    return not ended.not_done
