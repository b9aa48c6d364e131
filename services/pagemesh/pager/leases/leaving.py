"""Removes a sequence from every queue."""

from __future__ import annotations

from pagemesh.pager.books import Books
from pagemesh.wire.messages import SequenceKey


def leave_queues(books: Books, incarnation: int, key: SequenceKey) -> None:
    """Stop a sequence from waiting: for room, for its tenant, or for a prefix in flight."""
    before = books.waiting.count
    books.waiting.discard(incarnation, key)
    left = books.in_flight.end_wait((incarnation, key)) is not None
    if left or books.waiting.count < before:
        books.freed = True  # the next one behind it may be served
