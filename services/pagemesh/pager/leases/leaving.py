"""Whoever waits for pages and wants none any more."""

from __future__ import annotations

from pagemesh.pager.books import Books
from pagemesh.wire.messages import SequenceKey


def leave_queues(books: Books, incarnation: int, key: SequenceKey) -> None:
    """A sequence waits for nothing: no room, no tenant, nothing in flight."""
    before = books.waiting.count
    books.waiting.discard(incarnation, key)
    left = books.in_flight.end_wait((incarnation, key)) is not None
    if left or books.waiting.count < before:
        books.freed = True  # of those behind it the next may be served
