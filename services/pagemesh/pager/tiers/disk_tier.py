"""What is on disk: which slot holds which page, and whose it is.

    free slot --claim--> WRITING --written--> WRITTEN --drop, or claimed by another--> free slot
                                               |  ^
                                      hold     v  |  release
                                              being read

A tenant with a quota on disk that has used it up gives slots of its own for new ones. Where nobody
has, and no slot is free, whoever has the most for its share gives one (``disk_shelves``).

Pages are found by *chain key* (``chain_keys``). It is only a hint. What is believed is the
cryptographic digest of the same tokens, which is in the record and checked when the page is read.

A slot that is being written or read is nobody else's until that is over, even if the record is
dropped meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from heapq import nlargest
from itertools import count

from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.tiers.chain_keys import chain_keys
from pagemesh.pager.tiers.disk_shelves import DiskAccount, Record, Shelf
from pagemesh.pager.tiers.fetch_cost import FetchCost
from pagemesh.pager.tiers.tier_counts import TierCounts
from pagemesh.pager.tiers.tier_events import DiskFound
from pagemesh.wire.cache_messages import LINES_MAX, DiskLine, DiskTenantLine
from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms

TENANTS_MAX = 1_024
"""Tenants with a quota beyond these have no share of their own."""


class DiskTier:
    """The slots of an open disk. ``staged_pages_max``: how many pages may wait to be written."""

    def __init__(self, facts: PoolFacts, found: DiskFound, staged_pages_max: int) -> None:
        self._width = facts.page_token_bytes
        self._medium = found.medium
        self.slot_count = found.slot_count
        self.staged_pages_max = staged_pages_max
        self.staged: dict[int, Record] = {}
        """By slot: what is being written."""
        self.cost = FetchCost(facts.page_bytes, facts.page_size, found.memory_pages)
        self.counts = TierCounts()
        self.page_count = 0
        """Pages that can be found."""
        self.common = DiskAccount("", found.slot_count)
        self.accounts: dict[str, DiskAccount] = {}
        self._giver: DiskAccount | None = None
        """Who had the most for its share; None: whoever has is to be looked for."""
        self._others_share_max = 0.0
        """None of the others has more of what it may have."""
        self._shelves: dict[bytes, Shelf] = {}
        self._leaving: deque[Shelf] = deque()
        """Nothing of these is found any more; their slots are freed in parts."""
        self._dropped_busy: dict[int, Record] = {}
        """By slot: forgotten, and in use still."""
        self._uses = count(1)
        records = found.records
        columns = (records.chains.tolist(), records.slots.tolist(), records.root_indexes.tolist())
        used = bytearray(found.slot_count)
        for chain, slot, root_index in zip(*columns, strict=True):
            shelf = self._shelf(records.roots[root_index])
            before = shelf.records.get(chain)
            if before is not None:  # written twice: the newer one counts
                self._take(before)
                used[before.slot] = 0
                shelf = self._shelf(shelf.root)
            self._put(Record(chain, slot, shelf, True, next(self._uses)))
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
        accounts = nlargest(LINES_MAX, self.accounts.values(), key=lambda one: one.share)
        return DiskLine(
            state="on",
            medium=self._medium,
            total_pages=self.slot_count,
            used_pages=self.page_count,
            staged_pages=len(self.staged),
            root_count=len(self._shelves),
            tenants=[
                DiskTenantLine(tenant=a.tenant, pages=a.page_count, quota_pages=a.quota_slots)
                for a in accounts
            ],
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
        """``records``, a chain from its start, were used just now. The last goes first, since
        it is of no use without the others."""
        for record in reversed(list(records)):
            self._touch(record)

    def claim(
        self, chains: list[int], root: bytes, terms: CacheTerms = NO_TERMS
    ) -> tuple[list[int], list[int]]:
        """Slots for those pages of a chain that are not there yet, in place of the least recently
        used if need be: which of ``chains`` they are, and the slots. The last come first, since
        they are the first that can be spared; fewer than wanted when too much waits to be written,
        or every slot is busy. The tree is that of ``terms`` from now on."""
        staged = self.staged
        shelf = self._assigned(root, terms)
        places: list[int] = []
        slots: list[int] = []
        # More than the quota would drive out its own beginning.
        wanted = (
            min(len(chains), shelf.account.quota_slots) if shelf.account.tenant else len(chains)
        )
        for place in range(wanted - 1, -1, -1):
            chain = chains[place]
            known = shelf.records.get(chain)
            if known is not None:
                self._touch(known)
                continue
            slot: int | None = None
            if len(staged) < self.staged_pages_max:
                slot = self._slot_for(shelf.account)
                if not shelf.records:  # what it gave was its last
                    shelf = self._assigned(root, terms)
            if slot is None:
                missing = (one not in shelf.records for one in chains[: place + 1])
                self.counts.not_stored += sum(missing)
                break
            record = staged[slot] = Record(chain, slot, shelf, False, next(self._uses))
            self._put(record)
            places.append(place)
            slots.append(slot)
        if not shelf.records:
            self._forget_shelf(shelf)
        return places, slots

    def written(self, slots: Sequence[int]) -> list[int]:
        """``slots`` are written. Returns those that nobody wants any more."""
        records = [self.staged.pop(slot) for slot in slots]
        for record in records:
            record.is_written = True
            if record.is_dropped:
                self._let_go(record)
        kept = [record.slot for record in records if not record.is_dropped]
        self.counts.stored += len(kept)
        self.cost.recent.used(kept)
        return [record.slot for record in records if record.is_dropped]

    def not_taken(self, slots: Sequence[int]) -> list[int]:
        """What was to be written into ``slots`` is lost. Returns them: what they held before is
        nobody's, and is there still."""
        self.counts.not_stored += len(slots)
        for slot in slots:
            record = self.staged.pop(slot)
            record.is_written = True
            if record.is_dropped:
                self._let_go(record)
            else:
                self.drop(record)
        return list(slots)

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

    def drop(self, record: Record) -> None:
        """Forget ``record``, which can be found so far, or is one of those that leave."""
        self._take(record)
        self._free_later(record)

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
        """Slots of what was retired are to be freed."""
        return bool(self._leaving)

    def sweep(self, count_max: int) -> list[Record]:
        """Free some of the slots of what was retired, and say which they were."""
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
        if account is not self.common and account.page_count >= account.quota_slots:
            slot = self._evict(account)
            self.counts.over_quota += slot is not None
            return slot
        if self._free:
            return self._free.pop()
        slot = self._evict(self._richest())
        self.counts.evicted += slot is not None
        return slot

    def _richest(self) -> DiskAccount:
        """Who has the most for its share."""
        if not self.accounts:
            return self.common
        giver = self._giver
        if giver is None or giver.share < self._others_share_max:
            giver = self._giver = self._look_for_richest()
        return giver

    def _look_for_richest(self) -> DiskAccount:
        """At every account; ``_giver`` and ``_others_share_max`` tell when that is needed."""
        quotas_slots = sum(one.quota_slots for one in self.accounts.values())
        self.common.quota_slots = max(self.slot_count - quotas_slots, 1)
        everybody = (self.common, *self.accounts.values())
        first, second = nlargest(2, everybody, key=lambda one: one.share)
        self._others_share_max = second.share
        return first

    def _evict(self, account: DiskAccount) -> int | None:
        record = account.oldest()
        if record is None:
            return None
        self._take(record)
        record.is_dropped = True
        return record.slot

    def _put(self, record: Record) -> None:
        shelf, account = record.shelf, record.shelf.account
        shelf.records[record.chain] = record
        account.page_count += 1
        self.page_count += 1
        if len(shelf.records) == 1:
            account.queue(shelf)
        if self._giver is not None and account is not self._giver:
            self._others_share_max = max(self._others_share_max, account.share)

    def _take(self, record: Record) -> None:
        """``record`` is not found any more."""
        shelf = record.shelf
        del shelf.records[record.chain]
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
            shelf = self._shelves[root] = Shelf(root, self.common)
            self.common.shelf_count += 1
        return shelf

    def _forget_shelf(self, shelf: Shelf) -> None:
        del self._shelves[shelf.root]
        account = shelf.account
        account.shelf_count -= 1
        self._forget_empty(account)

    def _assigned(self, root: bytes, terms: CacheTerms) -> Shelf:
        """The shelf of ``root``, which is that of ``terms`` from now on."""
        shelf = self._shelf(root)
        account = self._account(terms)
        before = shelf.account
        if account is not before:
            account.shelf_count += 1
            account.page_count += len(shelf.records)
            before.page_count -= len(shelf.records)
            before.shelf_count -= 1
            self._forget_empty(before)
            shelf.account, self._giver = account, None
            if shelf.records:
                account.queue(shelf)
        return shelf

    def _forget_empty(self, account: DiskAccount) -> None:
        if not account.shelf_count and account is not self.common:
            del self.accounts[account.tenant]
            self._giver = None

    def _account(self, terms: CacheTerms) -> DiskAccount:
        if not terms.has_disk_quota:
            return self.common
        quota_slots = terms.disk_quota_pages(self.slot_count)
        account = self.accounts.get(terms.tenant)
        if account is None:
            if len(self.accounts) >= TENANTS_MAX:
                return self.common
            account = self.accounts[terms.tenant] = DiskAccount(terms.tenant, 0)
        if account.quota_slots != quota_slots:
            account.quota_slots, self._giver = quota_slots, None
        return account

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
        for account in (self.common, *self.accounts.values()):
            account.check([one for one in self._shelves.values() if one.account is account])
            is_known = self._giver is None or account is self._giver
            assert is_known or account.share <= self._others_share_max, "the richest is another"
