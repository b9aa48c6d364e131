"""Page accounts: one for each tenant with a quota, and a common one for all others.

The pages that a tenant's leases use, shared ones counted once, are its *used* pages. They may not
exceed its quota: further sequences of the tenant wait (``quotas``). The pages it has cached beyond
these, its *idle* pages, may exceed the quota as long as nobody else wants the room. Eviction takes
pages from the account that has the most relative to its share, by an eviction policy of that
account's own. So the pages that one tenant caches never displace those that another has within its
share.

    share   a tenant's quota; for the common account, what the quotas leave over

A tree belongs to the account of the tenant that asked for its root last. After a restart nobody has
asked yet, and it belongs to the common account.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pagemesh.pager.eviction import EvictionPolicy
from pagemesh.pager.leases.waiting import WaitList
from pagemesh.wire.cache_terms import CacheTerms

if TYPE_CHECKING:
    from pagemesh.pager.tree.radix import Node, Tree

ACCOUNTS_MAX = 1_024
"""Further tenants use the common account."""
NewPolicy = Callable[[int], EvictionPolicy]
"""Makes the eviction policy for an account, given its page count."""


class Account:
    """Pages of one tenant, or of all without a quota (``tenant`` is empty)."""

    __slots__ = (
        "idle_pages", "policy", "promised_pages", "quota_pages", "tenant", "tree_count",
        "used_pages", "waiting",
    )  # fmt: skip

    def __init__(
        self, tenant: str, quota_pages: int, policy: EvictionPolicy, waiting: WaitList
    ) -> None:
        self.tenant = tenant
        self.quota_pages = quota_pages
        self.policy = policy
        self.waiting = waiting
        """Its sequences that wait because they would exceed the quota."""
        self.used_pages = self.idle_pages = 0
        self.promised_pages = 0
        """Those of the used pages that its leases were promised and do not have yet."""
        self.tree_count = 0

    @property
    def is_over(self) -> bool:
        """Whether it is a tenant with more pages than its quota, cached ones included. Promised
        pages are left out: they are still idle or free, and idle ones would count twice."""
        has_pages = self.used_pages - self.promised_pages + self.idle_pages
        return self.tenant != "" and has_pages > self.quota_pages

    def pin(self, node: Node) -> None:
        """The idle ``node`` comes into use."""
        count = len(node.pages)
        self.idle_pages -= count
        self.used_pages += count
        self.policy.remove(node)

    def unpin(self, node: Node) -> None:
        """Nobody uses ``node`` any more."""
        count = len(node.pages)
        self.used_pages -= count
        self.idle_pages += count
        self.policy.add(node)

    def part(self, node: Node, keep: int) -> None:
        """The idle leaf ``node`` loses all but its first ``keep`` pages."""
        self.idle_pages -= len(node.pages) - keep
        self.policy.shrink(node, keep)


class Accounts:
    """All accounts of a pool of ``total_pages``; ``policy`` is for the common account."""

    def __init__(
        self, total_pages: int, policy: EvictionPolicy, new_policy: NewPolicy,
        waiter_count_max: int,
    ) -> None:  # fmt: skip
        self._total_pages = total_pages
        self._new_policy = new_policy
        self._waiter_count_max = waiter_count_max
        self._quotas_pages = 0
        self.common = Account("", total_pages, policy, WaitList(0))
        self.by_tenant: dict[str, Account] = {}

    def __iter__(self) -> Iterator[Account]:
        yield self.common
        yield from self.by_tenant.values()

    def richest(self) -> tuple[Account, float]:
        """The account to evict from next: of those with idle pages, the one with the most pages
        relative to its share. Also returns that ratio of the runner-up, -1 if there is none. Takes
        a step per account."""
        best, most, then = self.common, -1.0, -1.0
        if not self.by_tenant:
            return best, then
        if best.idle_pages:
            most = self._worth(best)
        for account in self.by_tenant.values():
            if account.idle_pages:
                value = (account.used_pages + account.idle_pages) / account.quota_pages
                if value > most:
                    best, most, then = account, value, most
                elif value > then:
                    then = value
        return best, then

    def is_richest(self, account: Account, others: float) -> bool:
        """Whether ``account`` still has idle pages, and more for its share than the ratio
        ``others``."""
        return account.idle_pages > 0 and (others < 0 or self._worth(account) > others)

    def _worth(self, account: Account) -> float:
        quota_pages = account.quota_pages
        if account is self.common:
            quota_pages = max(self._total_pages - self._quotas_pages, 1)
        return (account.used_pages + account.idle_pages) / quota_pages

    def find(self, terms: CacheTerms) -> Account | None:
        """The account of the tenant that ``terms`` name, if it has a quota and exists yet."""
        return self._account(terms) if terms.has_quota and terms.tenant in self.by_tenant else None

    def assign(self, tree: Tree, terms: CacheTerms, in_hand: Callable[[], tuple[int, int]]) -> None:
        """Assign ``tree`` to the account of ``terms``. ``in_hand`` returns how many pages outside
        the tree are held for it and how many are promised to its leases; called only if the account
        changes. That takes a step per edge, once after a restart or a change of limits."""
        before, account = tree.root.account, self._account(terms)
        if account is before:
            return
        below = list(tree.root.below())
        idle = [node for node in reversed(below) if not node.pins]
        for node in reversed(below):
            before.policy.forget(node)
        before.policy.tidy()
        for node in (tree.root, *below):
            node.account, node.note = account, None
        for node in idle:
            account.policy.add(node)
        idle_pages = sum(len(node.pages) for node in idle)
        held_pages, promised_pages = in_hand()
        pinned_pages = sum(len(node.pages) for node in below) - idle_pages
        used_pages = pinned_pages + held_pages + promised_pages
        before.idle_pages -= idle_pages
        before.used_pages -= used_pages
        before.promised_pages -= promised_pages
        account.idle_pages += idle_pages
        account.used_pages += used_pages
        account.promised_pages += promised_pages
        self.planted(tree, account)
        self.felled(tree, before)

    def planted(self, tree: Tree, account: Account) -> None:
        """``account`` has one more tree."""
        tree.root.account = account
        account.tree_count += 1

    def felled(self, tree: Tree, account: Account) -> None:
        """``account`` has one tree less."""
        account.tree_count -= 1

    def tidy(self) -> None:
        """Forget tenants without a tree, and have policies do the work they put off."""
        for account in self:
            account.policy.tidy()
        for account in list(self.by_tenant.values()):
            if not account.tree_count and not len(account.waiting):
                self._quotas_pages -= account.quota_pages
                del self.by_tenant[account.tenant]
                account.policy.close()

    def _account(self, terms: CacheTerms) -> Account:
        if not terms.has_quota:
            return self.common
        quota_pages = terms.quota_pages(self._total_pages)
        account = self.by_tenant.get(terms.tenant)
        if account is None:
            if len(self.by_tenant) >= ACCOUNTS_MAX:
                return self.common
            account = self.by_tenant[terms.tenant] = Account(
                terms.tenant, quota_pages, self._new_policy(quota_pages),
                WaitList(self._waiter_count_max),
            )  # fmt: skip
            self._quotas_pages += quota_pages
        elif account.quota_pages != quota_pages:
            self._quotas_pages += quota_pages - account.quota_pages
            account.quota_pages = quota_pages
        return account

    def check(self) -> None:
        """Raise ``AssertionError`` unless quotas and tenants add up."""
        assert self._quotas_pages == sum(one.quota_pages for one in self.by_tenant.values())
        for tenant, account in self.by_tenant.items():
            assert account.tenant == tenant and account.quota_pages > 0
            account.waiting.check()
