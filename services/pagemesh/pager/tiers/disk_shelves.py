"""Records of pages on disk by tree, and which of them is evicted next.

    shelf      the records of one tree, the least recently used first
    account    the shelves of a tenant with a quota on disk, or of all others together

Each use gives a record the next number, so the oldest record of an account is the first of one of
its shelves. A heap finds it: as numbers only grow, an entry is at worst too small, and then
renewed.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from itertools import count, islice
from typing import NamedTuple

import msgspec

from pagemesh.pager.tiers.followers import Followers
from pagemesh.pager.tiers.tier_events import FoundRecords

_LOOK_MAX = 64
"""Records looked at for one that is not in use; if all these are, nothing is evicted."""


class Record(msgspec.Struct, eq=False, gc=False):
    """One page on disk. ``before``: the chain key of the page before it; ``used``: the number of
    its last use."""

    chain: int
    before: int
    slot: int
    shelf: Shelf
    is_written: bool
    used: int
    reader_count: int = 0
    is_dropped: bool = False

    @property
    def is_busy(self) -> bool:
        """Its slot is being written or read."""
        return not self.is_written or self.reader_count > 0


class Claimed(NamedTuple):
    """The pages of a run that are to be written: their places in it, ascending, and their slots.
    ``dropped``: records of pages that could not be found any more."""

    places: list[int]
    slots: list[int]
    dropped: list[Record]


class Shelf:
    """The records of the tree ``root``, by chain key. ``followers``: which of them directly follow
    which page, on disk or not. ``start``: where its chain keys start."""

    __slots__ = ("account", "followers", "records", "root", "start")

    def __init__(self, root: bytes, start: int, account: DiskAccount) -> None:
        self.root, self.start = root, start
        self.account = account
        # Not a plain dict: finding its first key is linear after removals at the front.
        self.records: OrderedDict[int, Record] = OrderedDict()
        self.followers = Followers()

    def fitting(self, chains: list[int], room: int) -> int:
        """How many of ``chains``, from the first on, are here or fit into ``room`` more slots."""
        for place, chain in enumerate(chains):
            if chain not in self.records:
                if not room:
                    return place
                room -= 1
        return len(chains)

    def missing(self, chains: list[int]) -> int:
        """How many of ``chains`` are not here."""
        return sum(chain not in self.records for chain in chains)

    def strays(self) -> list[Record]:
        """Records whose predecessor is not here, unless they start a prefix."""
        records = self.records
        lines = [one for one in records.values() if one.before not in records]
        return [one for one in lines if one.before != self.start]

    def oldest(self, looked: int) -> tuple[Record | None, int]:
        """The oldest record not in use, and how many were looked at, with the ``looked`` before."""
        for record in islice(self.records.values(), _LOOK_MAX - looked):
            looked += 1
            if not record.is_busy:
                return record, looked
        return None, looked


class DiskAccount:
    """The shelves of a tenant, or of all without a quota. ``quota_slots``: what the tenant may take
    of the disk, or for the others what the quotas leave."""

    __slots__ = ("_numbers", "_queue", "page_count", "quota_slots", "shelf_count", "tenant")

    def __init__(self, tenant: str, quota_slots: int) -> None:
        self.tenant = tenant
        self.quota_slots = quota_slots
        self.page_count = self.shelf_count = 0
        self._queue: list[tuple[int, int, Shelf]] = []
        """A heap of uses and shelves. Each shelf with records has an entry whose use is not later
        than that of its oldest record."""
        self._numbers = count()

    @property
    def share(self) -> float:
        """What it has, as a share of what it may have."""
        return self.page_count / max(self.quota_slots, 1)

    def queue(self, shelf: Shelf) -> None:
        """Queue ``shelf``, which has just become ours with records, or got its first one."""
        heappush(self._queue, (next(iter(shelf.records.values())).used, next(self._numbers), shelf))

    def oldest(self) -> Record | None:
        """The least recently used record that is not in use; None if none is found soon."""
        queue, looked = self._queue, 0
        aside: list[tuple[int, int, Shelf]] = []
        found: Record | None = None
        while queue and found is None and looked < _LOOK_MAX:
            used, _, shelf = queue[0]
            if shelf.account is not self or not shelf.records:
                heappop(queue)
                continue
            if next(iter(shelf.records.values())).used != used:
                heappop(queue)
                self.queue(shelf)
                continue
            found, looked = shelf.oldest(looked)
            if found is None:
                aside.append(heappop(queue))
        for entry in aside:
            heappush(queue, entry)
        return found

    def check(self, shelves: list[Shelf]) -> None:
        """Raise ``AssertionError`` unless ``shelves``, all of ours, are counted and queued."""
        assert self.page_count == sum(len(shelf.records) for shelf in shelves)
        assert self.shelf_count == len(shelves)
        queued = {id(shelf): used for used, _, shelf in sorted(self._queue, key=lambda e: -e[0])}
        for shelf in shelves:
            uses = [record.used for record in shelf.records.values()]
            assert uses and uses == sorted(uses), "a shelf is empty, or not in the order of uses"
            assert queued.get(id(shelf), uses[0] + 1) <= uses[0], "a shelf would not be found"


class InOrder(NamedTuple):
    """``lines``: root index, chain key, chain key of the page before, and slot of each page, as if
    in order of use. ``older_slots``: slots with older copies of pages in other slots."""

    lines: list[tuple[int, int, int, int]]
    older_slots: list[int]


def oldest_first(found: FoundRecords) -> InOrder:
    """Order records as if by use, so that ends of prefixes are evicted first: what was written last
    is the most recent, and the pages before it are more recent still. If a page is in two slots, as
    when a writer dies before it writes over the old one, the newer record counts."""
    newest: dict[tuple[int, int], tuple[int, int]] = {}
    older_slots: list[int] = []
    columns = (found.root_indexes, found.chains, found.befores, found.slots)
    for root, chain, before, slot in zip(*(one.tolist() for one in columns), strict=True):
        if (older := newest.pop((root, chain), None)) is not None:
            older_slots.append(older[1])
        newest[root, chain] = before, slot
    lines: list[tuple[int, int, int, int]] = []
    while newest:
        (root, chain), (before, slot) = newest.popitem()
        path = [(root, chain, before, slot)]
        while (above := newest.pop((root, before), None)) is not None:
            chain, (before, slot) = before, above
            path.append((root, chain, before, slot))
        lines += reversed(path)
    lines.reverse()
    return InOrder(lines, older_slots)
