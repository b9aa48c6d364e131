"""Who has how much of the pool: an account for each tenant with a quota, one for all others.

What a tenant's leases use, shared pages counted once, is its *used* pages. They may not be more
than its quota: then it waits for itself (``quotas``). What it has cached beside that, its *idle*
pages, may be more while nobody else wants the room. When pages are evicted they are taken from
the account that has the most for its share, and there by an eviction policy of its own; so what
one tenant caches never drives out what another has within its share.

    share   its quota; of all those without one together, what the quotas leave over

A tree belongs to the account of the last who asked for its root. After a restart nobody has
asked yet, and it is the others'.
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
"""Tenants beyond these have no share of their own."""
NewPolicy = Callable[[int], EvictionPolicy]
"""Makes the policy of an account with so many pages."""


class Account:
    """Pages of one tenant, or (``tenant`` is empty) of all without a quota."""

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
        """Its sequences that would use more than the quota."""
        self.used_pages = self.idle_pages = 0
        self.promised_pages = 0
        """Of the used ones those that its leases do not have yet (``promises``)."""
        self.tree_count = 0

    @property
    def is_over(self) -> bool:
        """It is a tenant that has more than its quota, cached pages included. What is only
        promised lies in the cache or is free, and would count twice."""
        has_pages = self.used_pages - self.promised_pages + self.idle_pages
        return self.tenant != "" and has_pages > self.quota_pages

    def pin(self, node: Node) -> None:
        """The idle ``node`` is used now."""
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
    """All accounts of a pool of ``total_pages``; ``policy`` is that of the common one."""

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
        """Who has the most for its share, of those with idle pages: the next to lose some; and the
        most that another has. Takes a step for each account."""
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
        """Whether ``account`` still has more for its share than ``others``, and idle pages."""
        return account.idle_pages > 0 and (others < 0 or self._worth(account) > others)

    def _worth(self, account: Account) -> float:
        quota_pages = account.quota_pages
        if account is self.common:
            quota_pages = max(self._total_pages - self._quotas_pages, 1)
        return (account.used_pages + account.idle_pages) / quota_pages

    def find(self, terms: CacheTerms) -> Account | None:
        """The account with a quota that ``terms`` name, if it has any pages yet."""
        return self._account(terms) if terms.has_quota and terms.tenant in self.by_tenant else None

    def assign(self, tree: Tree, terms: CacheTerms, in_hand: Callable[[], tuple[int, int]]) -> None:
        """``tree`` is, from now on, that of ``terms``. ``in_hand``: how many pages that are not
        in the tree are held for it and how many are promised to its leases, asked for when it
        changes hands. That takes a step for each of its edges, once after a restart or a change of
        limits."""
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
        """Forget tenants without a tree, and have policies do what they put off."""
        for account in self:
            account.policy.tidy()
        for account in list(self.by_tenant.values()):
            if not account.tree_count and not len(account.waiting):
                self._quotas_pages -= account.quota_pages
                del self.by_tenant[account.tenant]

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
