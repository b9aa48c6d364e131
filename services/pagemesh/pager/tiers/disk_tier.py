"""What is on disk: which slot holds which page, and whose it is.

    free slot --claim--> WRITING --written--> WRITTEN --drop, or claimed by another--> free slot
                                               |  ^
                                      hold     v  |  release
                                              being read

A tenant that has used up its quota on disk gives up slots of its own for new pages. Otherwise, if
no slot is free, the account that uses the largest share of what it may have gives one up
(``disk_accounts``).

Pages are found by *chain key* (``chain_keys``), which is only a hint. What is trusted is the
cryptographic digest of the same tokens, which is in the record and checked when the page is read.

A page can be found only through all pages before it in its prefix. So none stays for long whose
predecessor is neither here nor in the pool: a slot is never taken from a page that others follow,
and when a page is lost because there is no room for it, what follows it is dropped, in parts.

A slot that is being written or read is not given to another page until that is over, even if the
record is dropped meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from itertools import chain as chain_of
from itertools import count

from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.tiers.chain_keys import chain_keys, root_chain
from pagemesh.pager.tiers.disk_accounts import DiskAccounts
from pagemesh.pager.tiers.disk_shelves import Claimed, DiskAccount, Record, Shelf, oldest_first
from pagemesh.pager.tiers.fetch_cost import FetchCost
from pagemesh.pager.tiers.severed import Severed
from pagemesh.pager.tiers.tier_counts import TierCounts
from pagemesh.pager.tiers.tier_events import DiskContents
from pagemesh.wire.cache_messages import DiskLine
from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms

_PASSED_MAX = 1_024
"""Least recently used records that are passed over for one slot, because others follow them."""


class DiskTier:
    """The slots of an open disk. ``staged_pages_max``: how many pages may wait to be written."""

    def __init__(self, facts: PoolFacts, found: DiskContents, staged_pages_max: int) -> None:
        self._width = facts.page_token_bytes
        self._medium = found.medium
        self.chain_key = found.chain_key
        self.slot_count = found.slot_count
        self.staged_pages_max = staged_pages_max
        self.staged: dict[int, Record] = {}
        """By slot: records that are being written, or wait for that."""
        self.cost = FetchCost(facts.page_bytes, facts.page_size, found.memory_pages)
        self.counts = TierCounts()
        self.page_count = 0
        """Pages that can be found."""
        self.accounts = DiskAccounts(found.slot_count)
        self._shelves: dict[bytes, Shelf] = {}
        self._leaving: deque[Shelf] = deque()
        """Shelves of retired roots: not found any more; their slots are freed in parts."""
        self.severed = Severed(self._shelves)
        self._dropped_busy: dict[int, Record] = {}
        """By slot: records that are dropped but still being written or read."""
        self._uses = count(1)
        lines, self.older_slots = oldest_first(found.records)
        """Free slots with older copies of pages in other slots: to be forgotten at the start."""
        used = bytearray(found.slot_count)
        for root_index, chain, before, slot in lines:
            shelf = self._shelf(found.records.roots[root_index])
            self._put(Record(chain, before, slot, shelf, True, next(self._uses)))
            used[slot] = 1
        self._free = [slot for slot in range(found.slot_count - 1, -1, -1) if not used[slot]]

    @property
    def staged_room(self) -> int:
        """How many pages more may wait to be written."""
        return max(0, self.staged_pages_max - len(self.staged))

    # Looking

    def find(self, root: bytes, chain: int) -> Record | None:
        shelf = self._shelves.get(root)
        return None if shelf is None else shelf.records.get(chain)

    def roots(self) -> set[bytes]:
        """The roots of what can be found."""
        return set(self._shelves)

    def line(self) -> DiskLine:
        """What operators are told."""
        return DiskLine(
            state="on",
            medium=self._medium,
            total_pages=self.slot_count,
            used_pages=self.page_count,
            staged_pages=len(self.staged),
            root_count=len(self._shelves),
            tenants=self.accounts.lines(),
            **asdict(self.counts),
        )

    def run(self, root: bytes, start: int, tokens: bytes, at: int, pages_max: int) -> list[Record]:
        """The longest run of pages that can be read now: those of ``tokens[at:]``, after the
        page whose chain key is ``start``."""
        found: list[Record] = []
        shelf = self._shelves.get(root)
        if shelf is None:
            return found
        records = shelf.records
        for chain in chain_keys(start, tokens, at, at + pages_max * self._width, self._width):
            record = records.get(chain)
            if record is None or record.is_busy:
                break
            found.append(record)
        return found

    # Changing

    def touch(self, records: Iterable[Record]) -> None:
        """``records``, a run from its start, were used just now. The last is to be evicted first,
        since it is of no use without the others."""
        for record in reversed(list(records)):
            self._touch(record)

    def claim(
        self, chains: list[int], before: int, root: bytes, terms: CacheTerms = NO_TERMS
    ) -> Claimed:
        """Slots for those pages of a run that leave the pool and are not here yet; the least
        recently used records are evicted if need be. ``before``: the chain key of the page before
        the first. If too much waits to be written, or every slot is busy, only the start of the run
        is kept: the rest is lost, and so is what follows it. The tree counts to the account of
        ``terms`` from now on."""
        shelf = self._assigned(root, terms)
        # A run longer than the quota would evict its own beginning.
        wanted = len(chains)
        if shelf.account is not self.accounts.common:
            wanted = min(wanted, shelf.account.quota_slots)
        end = shelf.fitting(chains[:wanted], self.staged_room)
        dropped: list[Record] = []
        if end < len(chains):
            self.counts.not_stored += shelf.missing(chains[end:wanted])
            dropped = self._cut_off(shelf, chains[end:])
        places, slots, short = self._put_run(chains[:end], before, root, terms, [])
        if short:  # the slots found go to the first pages
            shelf = self._assigned(root, terms)
            for place, slot in zip(places, slots, strict=True):
                del self.staged[slot]
                self._take(shelf.records[chains[place]])
            shelf = self._assigned(root, terms)
            cut = shelf.fitting(chains[:end], len(slots))
            self.counts.not_stored += shelf.missing(chains[cut:end])
            dropped += self._cut_off(shelf, chains[cut:])
            places, slots, _ = self._put_run(chains[:cut], before, root, terms, slots)
        left = self._shelves.get(root)
        if left is not None and not left.records:
            self._forget_shelf(left)
        places.reverse()
        slots.reverse()
        return Claimed(places, slots, dropped)

    def _put_run(
        self, chains: list[int], before: int, root: bytes, terms: CacheTerms, spare: list[int]
    ) -> tuple[list[int], list[int], int]:
        """Put those of ``chains`` that are not here into slots, ``spare`` ones first. Returns their
        places and slots, and how many pages at the start were not reached because no slot was to be
        had. Goes from the last page to the first, so that the ends are evicted first."""
        staged, spare = self.staged, spare.copy()
        shelf = self._assigned(root, terms)
        places: list[int] = []
        slots: list[int] = []
        for place in range(len(chains) - 1, -1, -1):
            chain = chains[place]
            known = shelf.records.get(chain)
            if known is not None:
                self._touch(known)
                continue
            slot: int | None = None
            if spare:
                slot = spare.pop()
            elif len(staged) < self.staged_pages_max:
                slot = self._slot_for(shelf.account)
                if not shelf.records:  # it gave up its last record
                    shelf = self._assigned(root, terms)
            if slot is None:
                return places, slots, place + 1
            previous = chains[place - 1] if place else before
            record = staged[slot] = Record(chain, previous, slot, shelf, False, next(self._uses))
            self._put(record)
            places.append(place)
            slots.append(slot)
        return places, slots, 0

    def lose(self, chains: list[int], root: bytes, *, at_once: bool = False) -> list[Record]:
        """A run of pages leaves the pool and is not stored. What follows the first of them that is
        not here cannot be found any more: it is dropped and returned, as by ``drop_all``."""
        shelf = self._shelves.get(root)
        if shelf is None:
            return []
        for place, chain in enumerate(chains):
            if chain not in shelf.records:
                return self._cut_off(shelf, chains[place:], at_once=at_once)
        return []

    def written(self, slots: Sequence[int]) -> list[Record]:
        """``slots`` are written. Returns those of their records that were dropped meanwhile."""
        records = [self.staged.pop(slot) for slot in slots]
        for record in records:
            record.is_written = True
            if record.is_dropped:
                self._let_go(record)
        kept = [record.slot for record in records if not record.is_dropped]
        self.counts.stored += len(kept)
        self.cost.recent.used(kept)
        return [record for record in records if record.is_dropped]

    def not_taken(self, slots: Sequence[int]) -> list[Record]:
        """What was to be written into ``slots`` is lost. Returns its records and those that cannot
        be found without them. What the slots held before is still there, and belongs to nobody."""
        self.counts.not_stored += len(slots)
        lost = [self.staged.pop(slot) for slot in slots]
        for record in lost:
            record.is_written = True
            if record.is_dropped:
                self._let_go(record)
        return [one for one in lost if one.is_dropped] + self.drop_all(lost)

    def hold(self, records: Iterable[Record]) -> None:
        """``records`` are being read."""
        for record in records:
            record.reader_count += 1

    def release(self, records: Iterable[Record]) -> None:
        """``records`` are not being read any more."""
        for record in records:
            record.reader_count -= 1
            if record.is_dropped:
                self._let_go(record)

    def drop_all(self, records: Iterable[Record], *, at_once: bool = False) -> list[Record]:
        """Drop ``records`` unless they are dropped already, including those of retired roots, and
        what cannot be found without them. Of all that was ``severed``, as much goes as a turn has
        time for, or all ``at_once``, so that none is found again. Returns what was dropped."""
        dropped: list[Record] = []
        for record in chain_of(records, self.severed.some(at_once=at_once)):
            if not record.is_dropped:
                self._take(record)
                self._free_later(record)
                self.severed.add(record.shelf, record.chain)
                dropped.append(record)
        return dropped

    def _cut_off(self, shelf: Shelf, chains: list[int], *, at_once: bool = False) -> list[Record]:
        """Drop what is here of ``chains``, a run that is not kept, and what follows it."""
        found = [record for record in map(shelf.records.get, chains) if record is not None]
        for chain in chains:
            self.severed.add(shelf, chain)
        dropped = self.drop_all(found, at_once=at_once)
        self.counts.cut_off += len(dropped)
        return dropped

    def strays(self) -> dict[bytes, list[Record]]:
        """By root: records whose predecessor is not here, unless they start a prefix."""
        found = ((root, shelf.strays()) for root, shelf in self._shelves.items())
        return {root: strays for root, strays in found if strays}

    def retire(self, roots: Collection[bytes]) -> None:
        """Nothing of ``roots`` is found from now on; ``sweep`` frees the slots."""
        for root in roots:
            shelf = self._shelves.get(root)
            if shelf is not None:
                self._forget_shelf(shelf)
                self.page_count -= len(shelf.records)
                shelf.account.page_count -= len(shelf.records)
                self.counts.invalidated += len(shelf.records)
                self._leaving.append(shelf)

    @property
    def is_sweeping(self) -> bool:
        """Whether slots of retired roots are still to be freed."""
        return bool(self._leaving)

    def sweep(self, count_max: int) -> list[Record]:
        """Free some slots of retired roots, at most ``count_max``. Returns their records."""
        swept: list[Record] = []
        while self._leaving and len(swept) < count_max:
            records = self._leaving[0].records
            while records and len(swept) < count_max:
                _, record = records.popitem(last=False)
                self._free_later(record)
                swept.append(record)
            if not records:
                self._leaving.popleft()
        return swept

    # Slots and shelves

    def _free_later(self, record: Record) -> None:
        record.is_dropped = True
        self.cost.recent.forget(record.slot)
        self._dropped_busy[record.slot] = record
        self._let_go(record)

    def _let_go(self, record: Record) -> None:
        if not record.is_busy:
            del self._dropped_busy[record.slot]
            self._free.append(record.slot)

    def _slot_for(self, account: DiskAccount) -> int | None:
        if account is not self.accounts.common and account.page_count >= account.quota_slots:
            slot = self._evict(account)
            self.counts.over_quota += slot is not None
            return slot
        if self._free:
            return self._free.pop()
        slot = self._evict(self.accounts.richest())
        self.counts.evicted += slot is not None
        return slot

    def _evict(self, account: DiskAccount) -> int | None:
        """The slot of the least recently used page that no other follows. A page that others follow
        is as recent as they are: when they were read, it was in the pool and was used there."""
        for _ in range(_PASSED_MAX):
            record = account.oldest()
            if record is None:
                return None
            if record.chain not in record.shelf.followers:
                self._take(record)
                record.is_dropped = True
                return record.slot
            self._touch(record)
        return None

    def _put(self, record: Record) -> None:
        shelf, account = record.shelf, record.shelf.account
        shelf.records[record.chain] = record
        shelf.followers.add(record.before, record.chain)
        self.page_count += 1
        if len(shelf.records) == 1:
            account.queue(shelf)
        self.accounts.grew(account)

    def _take(self, record: Record) -> None:
        """Take ``record`` out of the index."""
        shelf = record.shelf
        del shelf.records[record.chain]
        shelf.followers.remove(record.before, record.chain)
        if self._shelves.get(shelf.root) is shelf:
            shelf.account.page_count -= 1
            self.page_count -= 1
            if not shelf.records:
                self._forget_shelf(shelf)

    def _touch(self, record: Record) -> None:
        record.used = next(self._uses)
        record.shelf.records.move_to_end(record.chain)

    def _shelf(self, root: bytes) -> Shelf:
        shelf = self._shelves.get(root)
        if shelf is None:
            start = root_chain(self.chain_key, root)
            shelf = self._shelves[root] = Shelf(root, start, self.accounts.common)
            self.accounts.common.shelf_count += 1
        return shelf

    def _forget_shelf(self, shelf: Shelf) -> None:
        del self._shelves[shelf.root]
        self.accounts.left(shelf.account)

    def _assigned(self, root: bytes, terms: CacheTerms) -> Shelf:
        """The shelf of ``root``, which belongs to the account of ``terms`` from now on."""
        shelf = self._shelf(root)
        account = self.accounts.of(terms)
        if account is not shelf.account:
            self.accounts.assign(shelf, account)
        return shelf

    # Checking

    def check(self) -> None:
        """Raise ``AssertionError`` unless every slot is free or has one record."""
        shelves = [*self._shelves.values(), *self._leaving]
        found = [record for shelf in shelves for record in shelf.records.values()]
        records = [*found, *self._dropped_busy.values()]
        slots = [record.slot for record in records] + self._free
        assert sorted(slots) == list(range(self.slot_count)), "a slot is lost, or used twice"
        staged = {record.slot: record for record in records if not record.is_written}
        assert staged == self.staged and len(staged) <= self.staged_pages_max
        assert all(record.is_busy and record.is_dropped for record in self._dropped_busy.values())
        assert not any(record.is_dropped for record in found)
        assert self.page_count == sum(len(shelf.records) for shelf in self._shelves.values())
        for shelf in self._shelves.values():
            for record in shelf.records.values():
                assert record.chain in shelf.followers.of(record.before), "nobody drops it"
        self.accounts.check([*self._shelves.values()])
