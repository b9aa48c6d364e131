"""What the tenants of the machines use of the pool, looked at after each event."""

from __future__ import annotations

from collections import Counter

from pagemesh.pager.books import Books
from pagemesh.pager.leases.lease import Lease
from pagemesh.pager.tree.node import Node


class Tenancy:
    """Nobody is granted more than its quota has left. Beyond it are only pages computed a second
    time, beside those that are cached; what was declared after others had been admitted; and what
    was in use already when the quota was made smaller, or when a tree came to the tenant."""

    def __init__(self) -> None:
        self._used: dict[Node, int] = {}
        self._tenants: dict[Node, str] = {}
        """By the root of the tree: as of the event before."""
        self._leases: set[int] = set()
        self._quotas: dict[str, int] = {}
        """The largest that each tenant has had."""

    def check(self, books: Books, *, is_constant: bool) -> None:
        """Raise ``AssertionError`` if the last event has given somebody too much. ``is_constant``:
        whose trees are has never changed, but by what was declared."""
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
            # Otherwise who was admitted first may have come with a larger one than the next.
            quota = account.quota_pages if is_constant else largest
            is_within = now <= max(quota, before) or tenant in came
            assert is_within, f"{now} pages are used of {quota}, {before} before"
        self._used, self._tenants, self._leases = used, tenants, set(books.leases)

    def _came(self, tree: Node) -> bool:
        tenant = tree.account.tenant
        return self._tenants.get(tree, tenant) != tenant


def _declared_pages(books: Books, fresh: list[Lease]) -> Counter[str]:
    """By tenant: of leases of an earlier life that were taken up just now."""
    pages: Counter[str] = Counter()
    for lease in fresh:
        if lease.id <= books.facts.first_sequence:
            pages[lease.account.tenant] += lease.page_count + lease.promised_pages
    return pages


def _used_pages(books: Books) -> dict[Node, int]:
    """By the root of each tree: what is in use, without what was computed a second time."""
    trees = [*books.forest.trees.values(), *books.forest.retired.values()]
    roots = [tree.root for tree in trees]
    used = {root: sum(len(node.pages) for node in root.below() if node.pins) for root in roots}
    for lease in books.leases.values():
        copies = sum(map(len, lease.copies))
        used[lease.tree.root] += len(lease.held_pages) + lease.promised_pages - copies
    for load in books.loads.values():
        used[load.tree.root] += len(load.pages)
    return used
