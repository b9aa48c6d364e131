"""The memory of one host's pool, as in the pool file: headers, lease words, roots and slots, all of
which outlive the processes that write them.

Every write to a slot is checked against the header: only the writer that was granted the page may
write to it, and nobody may write to a committed page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from tests.sim.growths import DEAD
from tests.sim.world import Broken
from tests.support.ledger_numbers import each_of

from pagemesh.pager.events import (
    HeaderTable,
    Holder,
    KeepUntil,
    KeptPin,
    RootEntry,
    SetLeaseWord,
    SetStates,
    StoreRoot,
    WriteHeaders,
)
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.wire.pool_format import LEASE_SLOT_COUNT_MAX, HeaderState

_WRITABLE = (HeaderState.HELD, HeaderState.DRAINING, HeaderState.INVALID)
"""INVALID: the pager died while it wrote the header, so nobody has heard what it was about to
announce; nobody else gets the page before another pager has written a header."""
_WHOLE = (HeaderState.HELD, HeaderState.COMMITTED, HeaderState.DRAINING)
"""States of headers that the next pager trusts."""


@dataclass(slots=True)
class PoolMemory:
    incarnation: int
    page_count: int
    page_size: int
    epoch: int = 0
    states: list[int] = field(init=False)
    sequences: list[int] = field(init=False)
    identities: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    writers: list[int] = field(init=False)
    roots: list[int] = field(init=False)
    counts: list[int] = field(init=False)
    tokens: list[bytes] = field(init=False)
    until_ms: list[int] = field(init=False)
    slots: list[list[int]] = field(init=False)
    grown: list[int] = field(init=False)
    """The growth of its root (``growths``) in which each page was computed."""
    growths: dict[int, int] = field(default_factory=dict)
    """The growth in which each lease was granted: the only one whose pages it may read."""
    words: dict[int, int] = field(default_factory=dict)
    root_table: dict[int, RootEntry] = field(default_factory=dict)
    holders: dict[int, Holder] = field(default_factory=dict)
    pins: tuple[KeptPin, ...] = ()

    def __post_init__(self) -> None:
        count = self.page_count
        self.states = [int(HeaderState.FREE)] * count
        self.sequences = [0] * count
        self.identities = [0] * count
        self.parents = [0] * count
        self.writers = [0] * count
        self.roots = [0] * count
        self.counts = [0] * count
        self.tokens = [b""] * count
        self.until_ms = [FOREVER_MS] * count
        self.slots = [[0] * self.page_size for _ in range(count)]
        self.grown = [DEAD] * count

    # The pager's side -----------------------------------------------------------------------

    def write_headers(self, batch: WriteHeaders, *, whole_pages: int | None = None) -> None:
        """Publish ``batch``; with ``whole_pages``, the pager dies after that many of its pages, in
        the middle of the next one."""
        width = 4 * self.page_size
        pages = list(batch.pages)
        identities, parents, sequences = batch.identities, batch.parents, each_of(batch.sequences)
        last = len(pages) if whole_pages is None else min(whole_pages, len(pages))
        for index, page in enumerate(pages[:last]):
            self._sequence_grows(page, sequences[index])
            self.states[page] = int(batch.state)
            self.sequences[page] = sequences[index]
            self.identities[page] = int(identities[index])
            self.parents[page] = int(parents[index])
            self.writers[page] = batch.writer
            self.roots[page] = batch.root
            self.counts[page] = batch.token_count
            self.tokens[page] = batch.tokens[index * width : (index + 1) * width]
            self.until_ms[page] = batch.until_ms
        if last < len(pages):
            self.states[pages[last]] = int(HeaderState.INVALID)

    def set_states(self, batch: SetStates, *, whole_pages: int | None = None) -> None:
        pages, sequences = list(batch.pages), each_of(batch.sequences)
        for index, page in enumerate(pages[:whole_pages]):
            self._sequence_grows(page, sequences[index])
            self.states[page] = int(batch.state)
            self.sequences[page] = sequences[index]

    def keep_until(self, command: KeepUntil, *, whole_pages: int | None = None) -> None:
        for page in list(command.pages)[:whole_pages]:
            if self.states[page] != HeaderState.COMMITTED:
                raise Broken(f"page {page} is kept, and not committed")
            self.until_ms[page] = max(self.until_ms[page], command.until_ms)

    def _sequence_grows(self, page: int, sequence: int) -> None:
        if sequence < self.sequences[page]:
            raise Broken(
                f"page {page}: ledger sequence goes back from {self.sequences[page]:x}"
                f" to {sequence:x}"
            )

    def set_word(self, command: SetLeaseWord) -> None:
        self.words[command.slot] = command.value

    def store_root(self, command: StoreRoot) -> None:
        if command.live:
            whole = zip(self.states, self.roots, strict=True)
            if any(state in _WHOLE and root == command.index for state, root in whole):
                raise Broken(f"line {command.index} is given to a root while a page names it")
        self.root_table[command.index] = RootEntry(command.index, command.digest, command.live)

    def header_table(self) -> HeaderTable:
        """The headers that a new pager finds."""
        width = 4 * self.page_size
        return HeaderTable(
            states=np.array(self.states, np.uint8),
            sequences=np.array(self.sequences, np.uint64),
            identities=np.array(self.identities, np.uint64),
            parents=np.array(self.parents, np.uint64),
            writers=np.array(self.writers, np.uint64),
            roots=np.array(self.roots, np.uint32),
            counts=np.array(self.counts, np.uint32),
            tokens=np.frombuffer(
                b"".join(line.ljust(width, b"\0") for line in self.tokens), "<u4"
            ).reshape(self.page_count, self.page_size),
            until_ms=np.array(self.until_ms, np.int64),
        )

    def lease_words(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        words = np.zeros(LEASE_SLOT_COUNT_MAX, np.uint64)
        for slot, value in self.words.items():
            words[slot] = value
        return words

    # A worker's side ------------------------------------------------------------------------

    def write(self, page: int, offset: int, value: int, writer: int, growth: int) -> None:
        state = self.states[page]
        if state not in _WRITABLE or self.writers[page] != writer:
            raise Broken(
                f"page {page} is {HeaderState(state).name} of writer {self.writers[page]},"
                f" and writer {writer} writes into it"
            )
        self.slots[page][offset] = value
        self.grown[page] = growth
