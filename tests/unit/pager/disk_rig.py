"""A pager core with a fake pool and a fake disk, which performs commands when the test says so."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from tests.unit.pager.rig import LIMITS, ROOT, Rig, Worker, is_queued
from tests.unit.pager.steps import cache

from pagemesh.pager.events import Command
from pagemesh.pager.limits import PagerLimits
from pagemesh.pager.pages.runs import Pages, table_of
from pagemesh.pager.tiers.chain_keys import chain_keys, chain_over, root_chain
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.tier_events import (
    DiskContents,
    DiskFailed,
    DiskFound,
    ForgetRetired,
    ForgetSlots,
    FoundRecords,
    GiveUpDisk,
    LoadPages,
    PagesLoaded,
    PagesWritten,
    RememberRetired,
    RetiredRoots,
    SkipSlots,
    StorePages,
    TellDamaged,
)
from pagemesh.wire.pager_messages import Granted
from pagemesh.wire.tokens import pack

CHAIN_KEY = b"chains" * 5
PROMPT = range(17)
"""Four full pages, and one token to compute."""
Prefix = tuple[bytes, bytes]
"""A root, and all tokens up to the end of a page."""


class DiskRig(Rig):
    """Keeps stored pages by slot, as the prefixes they end. Nothing is performed before ``write``
    and ``load`` are called."""

    def __init__(
        self,
        page_count: int = 16,
        slot_count: int = 64,
        *,
        limits: PagerLimits = LIMITS,
        memory_pages: int = 0,
    ) -> None:
        super().__init__(page_count, limits=limits)
        self.slot_count, self.memory_pages = slot_count, memory_pages
        self.slots: dict[int, tuple[Prefix, int]] = {}
        """Prefix and chain key of the complete record in each slot, in the order written."""
        self.skipped: set[int] = set()
        """Slots whose pending write must not become a record."""
        self.stores: list[StorePages] = []
        self.loads: list[LoadPages] = []
        self.kept = RetiredRoots()
        """The stored roots to forget on disk."""
        self.told_damaged: list[int] = []
        self.given_up: GiveUpDisk | None = None
        self.open()

    @property
    def width(self) -> int:
        return 4 * self.page_size

    def open(self) -> None:
        """Open the disk tier with the records on the disk."""
        self.skipped.clear()
        roots = list(dict.fromkeys(root for (root, _), _ in self.slots.values()))
        records = FoundRecords(
            np.array(list(self.slots), np.uint32),
            np.array([chain for _, chain in self.slots.values()], np.uint64),
            np.array([self._before(prefix) for prefix, _ in self.slots.values()], np.uint64),
            np.array([roots.index(root) for (root, _), _ in self.slots.values()], np.intp),
            tuple(roots),
        )
        contents = DiskContents(
            self.slot_count, records, 0, CHAIN_KEY, memory_pages=self.memory_pages
        )
        facts = self.core.books.facts
        tier = DiskTier(facts, contents, self.limits.staged_pages_max(facts))
        self.handle(DiskFound(tier, 0, self.kept))

    def _before(self, prefix: Prefix) -> int:
        """The chain key of the page before the last one of ``prefix``."""
        root, tokens = prefix
        start = root_chain(CHAIN_KEY, root)
        return chain_over(start, tokens, 0, len(tokens) - self.width, self.width)

    def restart_with_an_empty_pool(self) -> None:
        """Restart as after a power-off: only the disk is left."""
        slots, kept = self.slots, self.kept
        epoch = self.epoch
        self.__init__(  # type: ignore[misc]
            self.page_count, self.slot_count, limits=self.limits, memory_pages=self.memory_pages
        )
        self.epoch = epoch
        self.core = self._new_core()
        self.slots, self.kept = slots, kept
        self.open()

    def perform(self, command: Command) -> None:
        match command:
            case StorePages():
                self._check_pages(command.pages, command.tokens, command.indexes)
                self._check_chains(command)
                self.stores.append(command)
            case LoadPages():
                self.loads.append(command)
            case ForgetSlots(slots):
                self.skipped -= set(slots)
                for slot in slots:
                    self.slots.pop(slot, None)
            case SkipSlots(slots):
                self.skipped |= set(slots)
            case TellDamaged(slot):
                self.told_damaged.append(slot)
            case GiveUpDisk():
                self.given_up = command
            case RememberRetired(_, retired):
                self.kept |= retired
            case ForgetRetired():
                self.kept = RetiredRoots()
            case _:
                super().perform(command)

    def _check_pages(self, pages: Pages, tokens: bytes, indexes: Iterable[int]) -> None:
        """The pages must still hold ``tokens`` when their bytes are taken."""
        for page, index in zip(table_of(pages).tolist(), indexes, strict=True):
            part = tokens[index * self.width : (index + 1) * self.width]
            assert self.headers.tokens[page].tobytes() == part
            assert self.headers.states[page] == 3, "it was given to somebody before"

    def _check_chains(self, store: StorePages) -> None:
        """The chain keys must be right, or the pages would never be found again."""
        start, end = root_chain(CHAIN_KEY, store.root), len(store.tokens)
        chains = list(chain_keys(start, store.tokens, 0, end, self.width))
        assert [chains[index] for index in store.indexes] == list(store.chains)

    def write(self, *, dies: bool = False) -> None:
        """Perform all pending writes and tell the pager, unless it ``dies``."""
        stores, self.stores = self.stores, []
        for store in stores:
            rows = zip(store.slots, store.indexes, store.chains, strict=True)
            for slot, index, chain in rows:
                self.slots.pop(slot, None)
                if slot in self.skipped:
                    continue
                prefix = (store.root, store.tokens[: (index + 1) * self.width])
                self.slots[slot] = (prefix, chain)
            if not dies:
                self.handle(PagesWritten(store.slots))

    def load(
        self,
        *,
        bad_at: int | None = None,
        took_us: int = 100,
        memory_count: int = 0,
        memory_us: int = 0,
    ) -> None:
        """Perform all pending reads and tell the pager; the record ``bad_at`` is damaged."""
        loads, self.loads = self.loads, []
        for load in loads:
            for number, slot in enumerate(load.slots):
                prefix, _ = self.slots[slot]
                end = (load.first_index + number + 1) * self.width
                assert prefix == (load.root, load.tokens[:end]), "another page is there"
            good = len(load.slots) if bad_at is None else min(bad_at, len(load.slots))
            bad = None if good == len(load.slots) else load.slots[good]
            self.handle(
                PagesLoaded(load.load, good, took_us, bad, memory_count, memory_us)
            )  # fmt: skip

    def fail(self) -> None:
        self.handle(DiskFailed("disk: no space left on device"))

    def prefixes(self, root: bytes = ROOT) -> set[bytes]:
        """The prefixes of a root that are on disk."""
        return {tokens for (found, tokens), _ in self.slots.values() if found == root}


# Steps of tests


def flood(worker: Worker, number: int = 900) -> None:
    """Take the whole pool for a sequence that is not cached, so that everything is evicted."""
    granted = worker.granted(number, range(9_000, 9_001), reserve=worker.rig.page_count * 4)
    worker.release(granted, cache=False)


def put_on_disk(rig: DiskRig, worker: Worker, tokens: range) -> None:
    """Cache ``tokens``, evict them from the pool, and have them written to disk."""
    cache(worker, 1, tokens)
    flood(worker)
    rig.write()


def fetched(rig: DiskRig, worker: Worker, *, bad_at: int | None = None) -> Granted:
    """Put ``PROMPT`` on disk, request it again, and read it from there; see ``DiskRig.load``."""
    put_on_disk(rig, worker, PROMPT)
    assert is_queued(worker.admit(2, PROMPT))
    rig.load(bad_at=bad_at)
    [granted] = pushed(rig)
    return granted


def prefixes_of(tokens: range, page_size: int = 4) -> set[bytes]:
    ends = range(page_size, len(tokens) + 1, page_size)
    return {pack(tokens[:end]) for end in ends}


def pushed(rig: DiskRig) -> list[Granted]:
    return rig.taken(Granted)
