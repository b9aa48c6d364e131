"""Pages that are promised: to a prompt, which will fill them and has not come so far.

A lease has the pages that its next steps fill, and the others of its prompt are promised to it.
They stay in the cache, or free, until it asks for them; but nobody else is admitted to them, so
that prompts half computed never take each other's room, and who was admitted need not wait:

    free + idle  =  room (anybody's)  +  promised

A promise is used pages to a tenant's quota. It ends with the lease, or when the lease is offered.

It can be broken by what pins idle pages without asking for room: an operator's pin, or content
that was computed beside what the cache had of it. Then who is promised pages waits for them as for
growth, in the one order of sequences, where the oldest always gets on (``preemption``). After a
restart promises are declared with the leases, and are kept once idle pages may be evicted; to what
was promised to those who have not declared yet others are admitted, which breaks it as well.
"""

from __future__ import annotations

from pagemesh.pager.leases.lease import Lease


def first_part(count: int, first_pages: int) -> int:
    """Of ``count`` pages those that are granted at once, if ``first_pages`` are wanted (0: all). A
    short rest goes with them: it is not worth a call."""
    return first_pages if first_pages and 2 * count > 3 * first_pages else count


class Promises:
    """``page_count``: promised in all."""

    __slots__ = ("page_count",)

    def __init__(self) -> None:
        self.page_count = 0

    def give(self, lease: Lease, page_count: int) -> None:
        """Promise ``lease``, which has no promise, so many pages more; there is room."""
        lease.promised_pages = page_count
        self.page_count += page_count
        account = lease.account
        account.used_pages += page_count
        account.promised_pages += page_count

    def keep(self, lease: Lease, page_count: int) -> None:
        """``lease`` gets ``page_count`` pages, promised or not."""
        promised, account = lease.promised_pages, lease.tree.root.account
        if promised:
            kept = min(page_count, promised)
            lease.promised_pages = promised - kept
            self.page_count -= kept
            account.promised_pages -= kept
            page_count -= kept
        account.used_pages += page_count

    def take_back(self, lease: Lease) -> None:
        """Nothing is promised to ``lease``."""
        account = lease.account
        self.page_count -= lease.promised_pages
        account.used_pages -= lease.promised_pages
        account.promised_pages -= lease.promised_pages
        lease.promised_pages = 0
