"""Promised pages: pages that a prompt will fill later.

A lease has the pages that its next steps fill; the remaining pages of its prompt are promised to
it. These stay cached or free until the lease asks for them, but nobody else is admitted to them. So
half-computed prompts never take each other's room, and an admitted sequence need not wait:

    free + idle  =  room (anybody's)  +  promised

A promise counts as used pages against a tenant's quota. It ends with the lease, or when the lease
is offered.

A promise can be broken by whatever pins idle pages without asking for room: an operator's pin, or
a commit of content that the cache has already. Then the lease waits for its promised pages as for
growth, in the one order of sequences, where the oldest always goes on (``preemption``). After a
restart, promises are declared with the leases, and are kept once idle pages may be evicted. Until
a worker has declared, others may be admitted to what it was promised, which breaks the promise as
well.
"""

from __future__ import annotations

from pagemesh.pager.leases.lease import Lease


def first_part(count: int, first_pages: int) -> int:
    """How many of ``count`` pages to grant at once if ``first_pages`` are wanted (0: all). All are
    granted if few would remain: those are not worth another call."""
    return first_pages if first_pages and 2 * count > 3 * first_pages else count


class Promises:
    """Counts promised pages; ``page_count`` is their total."""

    __slots__ = ("page_count",)

    def __init__(self) -> None:
        self.page_count = 0

    def give(self, lease: Lease, page_count: int) -> None:
        """Promise ``page_count`` further pages to ``lease``, which must have no promise; there must
        be room."""
        lease.promised_pages = page_count
        self.page_count += page_count
        account = lease.account
        account.used_pages += page_count
        account.promised_pages += page_count

    def keep(self, lease: Lease, page_count: int) -> None:
        """Account for ``page_count`` pages given to ``lease``, promised ones first."""
        promised, account = lease.promised_pages, lease.tree.root.account
        if promised:
            kept = min(page_count, promised)
            lease.promised_pages = promised - kept
            self.page_count -= kept
            account.promised_pages -= kept
            page_count -= kept
        account.used_pages += page_count

    def take_back(self, lease: Lease) -> None:
        """End the promise to ``lease``."""
        account = lease.account
        self.page_count -= lease.promised_pages
        account.used_pages -= lease.promised_pages
        account.promised_pages -= lease.promised_pages
        lease.promised_pages = 0
