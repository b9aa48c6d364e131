"""Page quotas of tenants: a tenant that uses all of its pages waits for its own sequences.

A quota is like a small pool of its own. A sequence that would exceed it waits in a list of its
tenant, in the order of all sequences, and so is in no other tenant's way. While it is the first in
that list, younger leases of the same tenant are revoked for it. A request that could never fit is
refused with the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from pagemesh.pager.books import Books
from pagemesh.pager.leases.preemption import Preemption
from pagemesh.pager.leases.waiting import Waiter
from pagemesh.pager.tree.accounts import Account
from pagemesh.pager.tree.radix import Match
from pagemesh.wire.cache_terms import CacheTerms
from pagemesh.wire.errors import OverQuota
from pagemesh.wire.pager_messages import Admit, Extend


class Quotas:
    """Holds back sequences that would exceed their tenant's quota."""

    def __init__(self, books: Books, preemption: Preemption) -> None:
        self._books = books
        self._preemption = preemption

    def require_fitting(self, terms: CacheTerms, page_count: int) -> None:
        """Raises ``OverQuota`` if the quota of ``terms`` never allows ``page_count`` pages."""
        self._require(terms.tenant, terms.quota_pages(self._books.pool.total), page_count)

    def require_growing(self, account: Account, page_count: int) -> None:
        """Raises ``OverQuota`` if the quota never allows a lease of ``page_count`` pages."""
        if account.tenant:
            self._require(account.tenant, account.quota_pages, page_count)

    def _require(self, tenant: str, quota_pages: int, page_count: int) -> None:
        if page_count > quota_pages:
            raise OverQuota(
                f"the request needs {page_count} pages, and {tenant} may use {quota_pages} at "
                "once: shorten the prompt, lower max_tokens, or ask for a larger quota"
            )

    def account_of(self, message: Admit | Extend) -> Account | None:
        """The account with a quota that ``message`` counts against, if it has any pages yet."""
        if isinstance(message, Admit):
            return self._books.accounts.find(message.terms)
        account = self._books.leases[message.lease].account
        return account if account.tenant else None

    def room(self, account: Account) -> int:
        """Pages that ``account`` may still use."""
        if not account.tenant:
            return self._books.pool.total
        return account.quota_pages - account.used_pages

    def holds_back(self, waiter: Waiter, need_pages: int, match: Match | None) -> bool:
        """Whether ``waiter``, which needs ``need_pages`` more, has to wait for its tenant: that
        exceeds the quota, or a sequence of the tenant before it waits already. Raises ``Busy`` when
        too many wait."""
        account = self.account_of(waiter.message)
        if account is None:
            return False
        waiting = self._books.waiting
        if not account.waiting.ahead_of(waiter.place):
            if need_pages <= self.room(account):
                return False
            account.waiting.require_room(waiter)
            missing = need_pages - self.room(account)
            # Only if it could also queue for room: preempting for a refused waiter is a waste.
            if waiting.has_room(waiter):
                pressed = self._preemption.press(waiter.place, missing, match, within=account)
                if pressed and need_pages <= self.room(account):
                    return False
        waiting.hold_back(waiter, account.waiting)
        return True

    def shed_copies(self, waiter: Waiter) -> None:
        """Revoke a held-back lease whose private copies exceed the quota (``Preemption``)."""
        if isinstance(waiter.message, Extend):
            lease = self._books.leases[waiter.message.lease]
            self._preemption.shed_copies(lease, within=lease.account)

    def firsts(self) -> Iterator[Waiter]:
        """The first waiter of each tenant's list, then the next one for as long as the caller takes
        them out of the list."""
        for account in list(self._books.accounts.by_tenant.values()):
            for _ in range(len(account.waiting)):
                if not len(account.waiting):
                    break  # the leases of the others were revoked for the waiter before
                first = account.waiting.first
                yield first
                if first.name in account.waiting:
                    break
