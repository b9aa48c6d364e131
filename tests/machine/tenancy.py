"""Checks after each event what the machines' tenants use of the pool."""

from __future__ import annotations

from collections import Counter

from pagemesh.pager.books import Books
from pagemesh.pager.leases.lease import Lease
from pagemesh.pager.tree.node import Node


class Tenancy:
    """No tenant is granted more than is left of its quota. It may exceed the quota only by copies
    of pages that are cached as well; by leases declared after others had been admitted; and by
    pages that were in use already when the quota was lowered, or when a tree came to the tenant."""

    def __init__(self) -> None:
        self._used: dict[Node, int] = {}
        self._tenants: dict[Node, str] = {}
        """Tenants by root of their tree, as of the event before."""
        self._leases: set[int] = set()
        self._quotas: dict[str, int] = {}
        """The largest quota that each tenant has had."""

    def check(self, books: Books, *, is_constant: bool) -> None:
        """Raises ``AssertionError`` if the last event has given a tenant too much.
        ``is_constant``: trees have never changed their tenant, except by declarations."""
        used = _used_pages(books)
        tenants = {tree: tree.account.tenant for tree in used}
        fresh = [one for name, one in books.leases.items() if name not in self._leases]
        declared = _declared_pages(books, fresh)
        came = {tenant for tree, tenant in tenants.items() if self._came(tree)}
        if not is_constant:  # who was admitted first may have taken it elsewhere, and the next back
            counts = Counter(lease.tree.root for lease in fresh)
            came |= {tenants[tree] for tree, count in counts.items() if count > 1}
        for tenant, account in books.accounts.by_tenant.items():
            own = [tree for tree in tenants if tenants[tree] == tenant]
            before = sum(self._used.get(tree, 0) for tree in own) + declared[tenant]
            now = sum(used[tree] for tree in own)
            largest = self._quotas[tenant] = max(self._quotas.get(tenant, 0), account.quota_pages)
            # Otherwise the first sequence admitted may have had a larger quota than the next.
            quota = account.quota_pages if is_constant else largest
            is_within = now <= max(quota, before) or tenant in came
            assert is_within, f"{now} pages are used of {quota}, {before} before"
        self._used, self._tenants, self._leases = used, tenants, set(books.leases)

    def _came(self, tree: Node) -> bool:
        tenant = tree.account.tenant
        return self._tenants.get(tree, tenant) != tenant


def _declared_pages(books: Books, fresh: list[Lease]) -> Counter[str]:
    """Pages, by tenant, of leases from an earlier life that have just been taken up."""
    pages: Counter[str] = Counter()
    for lease in fresh:
        if lease.id <= books.facts.first_sequence:
            pages[lease.account.tenant] += lease.page_count + lease.promised_pages
    return pages


def _used_pages(books: Books) -> dict[Node, int]:
    """Pages in use by root of each tree, without copies of cached pages."""
    trees = [*books.forest.trees.values(), *books.forest.retired.values()]
    roots = [tree.root for tree in trees]
    used = {root: sum(len(node.pages) for node in root.below() if node.pins) for root in roots}
    for lease in books.leases.values():
        copies = sum(map(len, lease.copies))
        used[lease.tree.root] += len(lease.held_pages) + lease.promised_pages - copies
    for load in books.loads.values():
        used[load.tree.root] += len(load.pages)
    return used
