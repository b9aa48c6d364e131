"""How much of the disk each tenant may use, and who gives up a slot when none is free."""

from __future__ import annotations

from heapq import nlargest

from pagemesh.pager.tiers.disk_shelves import DiskAccount, Shelf
from pagemesh.wire.cache_messages import LINES_MAX, DiskTenantLine
from pagemesh.wire.cache_terms import CacheTerms

TENANTS_MAX = 1_024
"""Further tenants with a quota have no account of their own."""


class DiskAccounts:
    """The accounts of a disk with ``slot_count`` slots."""

    def __init__(self, slot_count: int) -> None:
        self._slot_count = slot_count
        self.common = DiskAccount("", slot_count)
        self.by_tenant: dict[str, DiskAccount] = {}
        self._giver: DiskAccount | None = None
        """The account with the highest share so far; None if it has to be looked for."""
        self._others_share_max = 0.0
        """An upper bound of the shares of all other accounts."""

    def of(self, terms: CacheTerms) -> DiskAccount:
        """The account for trees with ``terms``, made if need be."""
        if not terms.has_disk_quota:
            return self.common
        quota_slots = terms.disk_quota_pages(self._slot_count)
        account = self.by_tenant.get(terms.tenant)
        if account is None:
            if len(self.by_tenant) >= TENANTS_MAX:
                return self.common
            account = self.by_tenant[terms.tenant] = DiskAccount(terms.tenant, 0)
        if account.quota_slots != quota_slots:
            account.quota_slots, self._giver = quota_slots, None
        return account

    def assign(self, shelf: Shelf, account: DiskAccount) -> None:
        """Move ``shelf`` to ``account``."""
        before = shelf.account
        account.shelf_count += 1
        account.page_count += len(shelf.records)
        before.page_count -= len(shelf.records)
        self.left(before)
        shelf.account, self._giver = account, None
        if shelf.records:
            account.queue(shelf)

    def left(self, account: DiskAccount) -> None:
        """``account`` has one shelf less."""
        account.shelf_count -= 1
        if not account.shelf_count and account is not self.common:
            del self.by_tenant[account.tenant]
            self._giver = None

    def grew(self, account: DiskAccount) -> None:
        """``account`` has one page more."""
        account.page_count += 1
        if self._giver is not None and account is not self._giver:
            self._others_share_max = max(self._others_share_max, account.share)

    def richest(self) -> DiskAccount:
        """The account that uses the largest share of what it may have."""
        if not self.by_tenant:
            return self.common
        giver = self._giver
        if giver is None or giver.share < self._others_share_max:
            giver = self._giver = self._look_for_richest()
        return giver

    def _look_for_richest(self) -> DiskAccount:
        """Compare all accounts; ``_giver`` and ``_others_share_max`` tell when that is needed."""
        quotas_slots = sum(one.quota_slots for one in self.by_tenant.values())
        self.common.quota_slots = max(self._slot_count - quotas_slots, 1)
        everybody = (self.common, *self.by_tenant.values())
        first, second = nlargest(2, everybody, key=lambda one: one.share)
        self._others_share_max = second.share
        return first

    def lines(self) -> list[DiskTenantLine]:
        """What operators are told, the largest shares first."""
        accounts = nlargest(LINES_MAX, self.by_tenant.values(), key=lambda one: one.share)
        return [
            DiskTenantLine(tenant=a.tenant, pages=a.page_count, quota_pages=a.quota_slots)
            for a in accounts
        ]

    def check(self, shelves: list[Shelf]) -> None:
        """Raise ``AssertionError`` unless ``shelves``, all there are, are counted and queued."""
        for account in (self.common, *self.by_tenant.values()):
            account.check([one for one in shelves if one.account is account])
            is_known = self._giver is None or account is self._giver
            assert is_known or account.share <= self._others_share_max, "the richest is another"
