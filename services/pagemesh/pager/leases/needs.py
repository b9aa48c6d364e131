"""What it takes to serve a request now: which pages are cached, and room for the others."""

from __future__ import annotations

from pagemesh.pager.books import Books
from pagemesh.pager.leases.lease import NO_TREE
from pagemesh.pager.leases.overtaking import Outlook
from pagemesh.pager.leases.quotas import Quotas
from pagemesh.pager.leases.waiting import require_own
from pagemesh.pager.retention.roots import has_root_place
from pagemesh.pager.tree.radix import Match
from pagemesh.wire.errors import Busy, DeadlineExceeded, Malformed, NoCapacity
from pagemesh.wire.pager_messages import Admit, Extend


class Needs:
    """Computes what requests need; changes nothing."""

    def __init__(self, books: Books, quotas: Quotas) -> None:
        self._books, self._quotas = books, quotas
        self._page_size, self._page_count = books.facts.page_size, books.facts.page_count

    def require_admissible(self, message: Admit) -> None:
        """Raises a ``Fault`` if ``message`` cannot be admitted, however much room there is."""
        count, extra = divmod(len(message.tokens), 4)
        if extra or not count:
            raise Malformed(
                "packed tokens must be a multiple of 4 bytes, and at least 4, got "
                f"{len(message.tokens)}"
            )
        if message.reserve_tokens < count:
            raise Malformed(
                f"reserve_tokens {message.reserve_tokens} is less than the {count} tokens sent"
            )
        require_own(message.order, message.key)
        if not message.deadline_ms:
            raise DeadlineExceeded("no time is left before the deadline")
        page_count = -(-message.reserve_tokens // self._page_size)
        self.require_in_pool(page_count)
        if message.terms.has_quota:
            self._quotas.require_fitting(message.terms, page_count)
        if not self._books.slots or not has_root_place(self._books, message.root):
            raise Busy(
                "too many leases are open, or leases of too many roots", retry_after_ms=1_000
            )

    def require_in_pool(self, page_count: int) -> None:
        """Raises ``NoCapacity`` if the whole pool has fewer pages, and ``Busy`` if it has fewer
        without the pages that wait for an unresponsive disk: such a request would block the queue.
        """
        if page_count > self._page_count:
            raise NoCapacity(
                f"the request needs {page_count} pages, and the whole pool has "
                f"{self._page_count}: shorten the prompt, lower max_tokens, or enlarge the pool"
            )
        if self._books.loads and page_count > self._page_count - (stuck := self._stuck_pages()):
            raise Busy(
                f"the request needs {page_count} pages, and {stuck} of {self._page_count} wait "
                "for a disk that does not answer: try again later",
                retry_after_ms=1_000,
            )

    def _stuck_pages(self) -> int:
        """Pages whose read from disk takes too long."""
        books = self._books
        since_ms = books.now_ms - books.limits.in_flight_stall_ms_max
        return sum(len(load.pages) for load in books.loads.values() if load.begun_ms <= since_ms)

    def match(self, message: Admit) -> Match:
        """The cached prefix that ``message`` may use. Its last token is never matched, since it is
        always computed."""
        tree = self._books.forest.trees.get(message.root, NO_TREE)
        tokens = message.tokens
        pages_max = (len(tokens) // 4 - 1) // self._page_size if message.read_cache else 0
        return self._books.forest.match(tree.root, tokens, pages_max)

    def match_of(self, message: Admit | Extend) -> Match | None:
        """The cached prefix that serving ``message`` would pin; None for an ``Extend``."""
        return self.match(message) if isinstance(message, Admit) else None

    def room_beside(self, match: Match) -> int:
        """Room that would be left once ``match`` is pinned."""
        books = self._books
        return books.room_for(-books.forest.idle_pages(match))

    def _pages_beside(self, match: Match, message: Admit) -> int:
        """Pages that ``message`` needs in addition to ``match``."""
        return self._books.facts.pages_for(message.reserve_tokens) - match.pages

    def missing_pages(self, message: Admit | Extend, match: Match | None) -> int:
        """How many pages are missing to serve ``message``; ``match``: see ``match_of``."""
        books = self._books
        if isinstance(message, Admit):
            assert match is not None
            return self._pages_beside(match, message) - self._room_soon(
                -books.forest.idle_pages(match)
            )
        lease = books.leases[message.lease]
        need = message.page_count - lease.page_count
        if need <= lease.promised_pages:  # available as soon as idle pages may be evicted
            return need - books.pool.free - books.pool.idle
        return need - self._room_soon(lease.promised_pages)

    def _room_soon(self, promised_pages: int) -> int:
        """``Books.room_for``, including pages that may be evicted once every worker has declared
        what it holds from an earlier pager life: no lease is revoked for want of those, unless a
        declaration takes too long."""
        books = self._books
        since_ms = max((books.sessions[one].since_ms for one in books.unsettled), default=None)
        if since_ms is None or books.now_ms - since_ms > books.limits.settle_late_ms:
            return books.room_for(promised_pages)
        pool = books.pool
        return pool.free + pool.idle - books.promises.page_count + promised_pages

    def more_of_tenant(self, message: Admit | Extend, match: Match | None) -> int:
        """Pages that the tenant would use in addition if ``message`` were served; ``match``: see
        ``match_of``."""
        books = self._books
        if isinstance(message, Extend):
            lease = books.leases[message.lease]
            return message.page_count - lease.page_count - lease.promised_pages
        assert match is not None
        return self._pages_beside(match, message) + books.forest.idle_pages(match)

    def outlook(self, message: Admit) -> Outlook:
        """What it would take to admit ``message``."""
        books, match, terms = self._books, self.match(message), message.terms
        need = self._pages_beside(match, message)
        free = books.pool.free - books.promises.page_count
        fits = need <= max(free, self.room_beside(match))
        account = books.accounts.by_tenant.get(terms.tenant) if terms.has_quota else None
        if account is not None and fits:
            more = need + books.forest.idle_pages(match)
            fits = not len(account.waiting) and more <= self._quotas.room(account)
        share = match.pages * self._page_size / (len(message.tokens) // 4)
        return Outlook(share, fits, need > free)
