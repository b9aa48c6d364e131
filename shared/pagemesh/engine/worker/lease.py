"""A lease as its holder sees it, with its page table.

    HELD -> RELEASING -> gone        the sequence ended; given back when its step has ended
      |
      +--> LOST ------> gone         the pager took it back; acknowledged separately
      |
      +--> OFFERED ---> gone         a ticket owns it
              |
              +-------> HELD         withdrawn

A lease that a running step uses (``in_step``) is neither released nor acknowledged before the
step has ended.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms
from pagemesh.wire.messages import Order, SequenceKey
from pagemesh.wire.pager_messages import Fill
from pagemesh.wire.tokens import U32, pack


class Hold(enum.Enum):
    HELD = "ours"
    OFFERED = "a ticket's"
    RELEASING = "to be given back when its step has ended"
    LOST = "taken back"


_MOVES = {
    Hold.HELD: {Hold.OFFERED, Hold.RELEASING, Hold.LOST},
    Hold.OFFERED: {Hold.HELD, Hold.RELEASING, Hold.LOST},
    Hold.RELEASING: {Hold.LOST},
    Hold.LOST: set[Hold](),
}


class TokenBuffer:
    """Prompt and generated ids in one append-only array.

    Views stay valid while it grows, so a running step can hold them.
    """

    __slots__ = ("_array", "length")

    def __init__(self, tokens: U32, capacity: int) -> None:
        self._array = np.empty(max(capacity, len(tokens), 1), np.dtype("<u4"))
        self._array[: len(tokens)] = tokens
        self.length = len(tokens)

    def append(self, token: int) -> None:
        if self.length == len(self._array):
            grown = np.empty(2 * self.length, np.dtype("<u4"))
            grown[: self.length] = self._array
            self._array = grown
        self._array[self.length] = token
        self.length += 1

    def view(self, first: int, end: int) -> U32:
        return self._array[first:end]


@dataclass(slots=True, eq=False)
class Lease:
    lease: int
    slot: int
    granted_at: int
    key: SequenceKey
    order: Order
    root: bytes
    tokens: TokenBuffer
    """The sequence's own buffer: the ids of all filled slots, and perhaps more."""
    page_size: int
    _pages: U32
    page_count: int
    filled: int
    """Slots whose K and V are written."""
    known: int
    """Token ids the pager is known to have."""
    committed: int
    """Slots that are in the prefix tree, or that the pager was asked to put there."""
    terms: CacheTerms = NO_TERMS
    tokens_max: int = 0
    """Slots that its sequence may ever fill."""
    reserved_pages: int = 0
    """Pages that its admission asked for; those that it does not have yet are promised."""
    hold: Hold = Hold.HELD
    in_step: bool = False
    is_told: bool = True
    """If it is lost: whether the pager has said so."""
    cache: bool = True
    extending: bool = False
    """An ``Extend`` is open."""
    told: bool = False
    """A notice since the last ``Extend`` said that its pages are there."""
    committing: bool = False
    """A ``Commit`` is open."""
    exact: bool = False
    """The pager can never grant as much as was asked for ahead of need: ask only for what is
    needed."""
    retry_ms: float = 0.0
    """No ``Extend`` before this time."""
    retries: int = 0
    ticket: str | None = None
    """Set from the offer on, until the ticket is known to be closed."""

    @classmethod
    def of(
        cls,
        *,
        lease: int,
        slot: int,
        granted_at: int,
        key: SequenceKey,
        order: Order,
        root: bytes,
        tokens: TokenBuffer,
        page_size: int,
        pages: U32,
        filled: int,
        known: int,
    ) -> Lease:
        """A lease fresh from a grant. ``pages``: uint32 [n], copied with room to grow."""
        table = np.empty(len(pages) + 8, np.dtype("<u4"))
        table[: len(pages)] = pages
        return cls(
            lease=lease,
            slot=slot,
            granted_at=granted_at,
            key=key,
            order=order,
            root=root,
            tokens=tokens,
            page_size=page_size,
            _pages=table,
            page_count=len(pages),
            filled=filled,
            known=known,
            committed=filled - filled % page_size,
        )

    @property
    def capacity(self) -> int:
        """Slots that its pages have."""
        return self.page_count * self.page_size

    @property
    def promised_pages(self) -> int:
        return max(self.reserved_pages - self.page_count, 0) if self.hold is Hold.HELD else 0

    @property
    def table(self) -> U32:
        """uint32 [pages]; a view that stays valid while pages are appended."""
        return self._pages[: self.page_count]

    def add_pages(self, first_index: int, pages: U32) -> None:
        """Add ``pages``, which belong at ``first_index`` of the table and after; entries that are
        already there stay."""
        fresh = pages[self.page_count - first_index :]
        need = self.page_count + len(fresh)
        if need > len(self._pages):
            grown = np.empty(2 * need, np.dtype("<u4"))
            grown[: self.page_count] = self._pages[: self.page_count]
            self._pages = grown
        self._pages[self.page_count : need] = fresh
        self.page_count = need

    def fill(self) -> Fill:
        first = min(self.known, self.filled)
        return Fill(
            filled_tokens=self.filled,
            first_token=first,
            tokens=pack(self.tokens.view(first, self.filled)),
        )

    def move(self, hold: Hold) -> None:
        if hold not in _MOVES[self.hold]:
            raise AssertionError(f"lease {self.lease} of {self.key}: {self.hold} to {hold}")
        self.hold = hold

    def check(self) -> None:
        assert self.filled <= self.capacity, (self.lease, self.filled, self.capacity)
        assert self.filled <= self.tokens.length, (self.lease, self.filled)
        assert self.committed <= self.filled, (self.lease, self.committed, self.filled)


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A partly filled page that a forked choice copies before it writes there."""

    source: Lease
    source_page: int
    target: Lease
    target_page: int
