"""Commits and releases: the pager learns token ids, and full pages become committed.

A ``Fill`` says how far a lease is written and brings the token ids that the pager may not know
yet. Commit, release, offer and fork all take one; each checks it before anything changes.
"""

from __future__ import annotations

from typing import Final

from pagemesh.pager.books import Books
from pagemesh.pager.events import PagesStored, WriteHeaders
from pagemesh.pager.leases.lease import Lease
from pagemesh.pager.leases.leaving import leave_queues
from pagemesh.pager.leases.states import LeaseState
from pagemesh.pager.pages.runs import Pages, first_of, part
from pagemesh.pager.retention.giving_up import give_up
from pagemesh.pager.retention.roots import hide
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.pager.tree.radix import Inserted
from pagemesh.wire.errors import Gone, Malformed
from pagemesh.wire.messages import Ok
from pagemesh.wire.pager_messages import NO_LEASE, Commit, Committed, Fill, Release
from pagemesh.wire.pool_format import HeaderState

_REVOKED: Final = LeaseState.REVOKED
_COMMITTED: Final = HeaderState.COMMITTED


class Filling:
    """Commits filled pages and releases leases."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._page_size = books.facts.page_size
        self._width = books.facts.page_token_bytes

    def commit(self, message: Commit) -> Committed:
        """Make full pages matchable in the tree. Raises ``Gone``, ``Stale`` or ``Malformed``."""
        lease = self._books.held_lease(
            message.worker, message.incarnation, message.lease, message.key
        )
        self.require(lease, message.fill)
        self.take(lease, message.fill)
        return Committed(
            lease=lease.id,
            committed_tokens=lease.anchor.depth * self._page_size,
            known_tokens=lease.known_tokens,
        )

    def release(self, message: Release) -> Ok:
        """Commit full pages, free the others, and end the lease. Raises ``Gone``, ``Stale`` or
        ``Malformed``."""
        books = self._books
        if message.lease == NO_LEASE:
            leave_queues(books, message.incarnation, message.key)
            return Ok()
        found = books.leases.get(message.lease)
        if found is None:
            if books.ended.was_held_by(message.lease, message.incarnation):
                return Ok()
            session = books.sessions.get(message.incarnation)
            if session is not None and message.lease in session.letting_go:
                books.let_go(session, message.lease)
                return Ok()
            raise Gone(f"lease {message.lease:x} is not there (any more): forget it")
        # Releasing a revoked lease acknowledges the revocation; what it filled since is lost.
        if found.life.state is _REVOKED and found.incarnation == message.incarnation:
            lease = found
        else:
            lease = books.held_lease(
                message.worker, message.incarnation, message.lease, message.key
            )
            self.require(lease, message.fill)
            if message.cache:
                self.take(lease, message.fill)
        anchor, is_retired = lease.anchor, lease.tree.is_retired
        books.end(lease, "release")
        if not message.cache and not is_retired:
            # Also the prefix it found cached, which may be the cause, and would spoil others too.
            give_up(books, anchor)
        return Ok()

    def require(self, lease: Lease, fill: Fill) -> None:
        """Raises ``Malformed`` unless ``fill`` fits the tokens and slots of ``lease``."""
        known = end = lease.tokens_first + len(lease.tokens) // 4
        slots, filled = lease.page_count * self._page_size, fill.filled_tokens
        if fill.first_token > known:
            raise Malformed(
                f"the tokens start at {fill.first_token}, but only {known} are known: send "
                f"those from {known} on"
            )
        if fill.tokens:
            end = max(known, self._require_tokens(lease, fill, known))
        if filled > end or filled > slots:
            raise Malformed(
                f"{filled} slots are filled, but {end} tokens are known and the lease has "
                f"{slots} slots: send the tokens of all filled slots, and extend the lease first"
            )
        if end > known and end > slots + self._page_size:
            raise Malformed(
                f"{end} tokens are far beyond the {slots} slots of the lease: extend it first"
            )

    def _require_tokens(self, lease: Lease, fill: Fill, known: int) -> int:
        """The position where the tokens of ``fill`` end. Raises ``Malformed`` if they differ from
        tokens that are known already."""
        count, odd = divmod(len(fill.tokens), 4)
        if odd:
            raise Malformed(
                f"packed tokens must be a multiple of 4 bytes, got {len(fill.tokens)}: send "
                "whole ids"
            )
        brought = fill.first_token + count
        low = max(lease.committed_pages * self._page_size, fill.first_token)
        high = min(known, brought)
        if low < high:
            ours = lease.known_from(low)[: 4 * (high - low)]
            theirs = fill.tokens[4 * (low - fill.first_token) : 4 * (high - fill.first_token)]
            if ours != theirs:
                raise Malformed(
                    f"tokens {low} to {high} differ from the known ones, which cannot change: "
                    "release the lease and admit again"
                )
        return brought

    def take(self, lease: Lease, fill: Fill) -> None:
        """Apply ``fill``, which must have passed ``require``, and commit the full pages."""
        brought, filled = fill.tokens, fill.filled_tokens
        if brought:
            skip = lease.known_tokens - fill.first_token
            if 4 * skip < len(brought):
                start = lease.committed_pages * self._page_size
                lease.tokens = lease.known_from(start) + brought[4 * skip :]
                lease.tokens_first = start
        if filled > lease.filled_tokens:
            lease.filled_tokens = filled
        count = lease.filled_tokens // self._page_size - lease.anchor.depth
        if count > 0:
            self._commit_pages(lease, count)

    def pinned_by(self, lease: Lease, fill: Fill) -> int:
        """Idle pages that committing ``fill`` would pin because the tree has the same content."""
        count = fill.filled_tokens // self._page_size - lease.committed_pages
        if count <= 0:
            return 0
        skip = lease.known_tokens - fill.first_token
        start = lease.committed_pages * self._page_size
        tokens = lease.known_from(start) + fill.tokens[4 * skip :]
        return self._books.forest.idle_pages(
            self._books.forest.match(
                lease.anchor, tokens[: count * self._width], count, is_over_too=True
            )
        )

    def _commit_pages(self, lease: Lease, count: int) -> None:
        books, before, known_tokens = self._books, lease.anchor, lease.tokens
        run = lease.take_written(count)
        at = 4 * (before.depth * self._page_size - lease.tokens_first)
        end = at + count * self._width
        tokens = known_tokens[at:end]
        inserted = books.forest.insert(before, tokens, run, grow=lease.made, timed=lease.ttl_ms > 0)
        books.forest.unpin(before)
        lease.anchor = inserted.node
        if len(known_tokens) - end < self._width:  # little is copied, and the prompt is let go
            lease.tokens = known_tokens[end:]
            lease.tokens_first += end // 4
        known = inserted.known_pages
        lease.made = known < count
        account = before.account
        account.used_pages -= count - known  # the tree has counted them as well
        if account.waiting.places:
            books.freed = True  # a waiter that shares these pages now needs fewer
        if known:
            lease.copies.append(part(run, 0, known))
        if lease.prompt_pages:
            if books.disk is not None:
                done_pages = lease.committed_pages - lease.matched_pages
                took_ms = books.now_ms - lease.granted_ms
                books.disk.cost.computed(done_pages * self._page_size, took_ms)
            books.in_flight.committed(lease, books.now_ms)
        if known < count:
            if known:
                run, tokens = part(run, known, count), tokens[known * self._width :]
            self._publish(lease, inserted, run, tokens)

    def _publish(self, lease: Lease, inserted: Inserted, pages: Pages, tokens: bytes) -> None:
        """Write the headers of ``pages``, which are new in the tree and hold ``tokens``."""
        books, tree, after = self._books, lease.tree, inserted.after
        books.out.append(
            WriteHeaders(
                pages, _COMMITTED, books.pool.sequences_of(pages), lease.incarnation,
                tree.index, inserted.first_identity,
                books.pool.identity_of(first_of(after)) if len(after) else 0,
                tokens, books.now_ms + lease.ttl_ms if lease.ttl_ms else FOREVER_MS,
            )
        )  # fmt: skip
        if tree.is_retired:
            hide(books, pages)
        else:
            books.late.append(PagesStored(tree.digest, after, pages, tokens))
