"""What is on disk: which slot holds which page, least recently used first.

    free slot --claim--> WRITING --written--> WRITTEN --drop, or claimed by another--> free slot
                                               |  ^
                                      hold     v  |  release
                                              being read

Pages are found by *chain key*: a 64-bit hash of all tokens from the root to the page's end, made in
a fraction of a microsecond a page. It is only a hint. What is believed is the cryptographic
digest of the same tokens, which is in the record and checked when the page is read.

A slot that is being written or read is nobody else's until that is over, even if the record is
dropped meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from xxhash import xxh3_64_intdigest

from pagemesh.pager.fetch_cost import FetchCost
from pagemesh.pager.limits import PoolFacts
from pagemesh.pager.radix import Node, Tree
from pagemesh.pager.runs import Pages
from pagemesh.pager.tier_events import DiskFound
from pagemesh.pager.waiting import FIRST
from pagemesh.wire.messages import Order, SequenceKey

PAGER = 0
"""The writer of pages that the pager itself holds; no worker incarnation is 0."""

_LOOK_MAX = 64
"""Records that may be in use at the old end of the list; more than that, and nothing is evicted."""


class Record(msgspec.Struct, eq=False, gc=False):
    """One page on disk. ``root``: the digest of its tree."""

    chain: int
    slot: int
    root: bytes
    is_written: bool
    reader_count: int = 0
    is_dropped: bool = False

    @property
    def is_busy(self) -> bool:
        """Its slot is being written or read."""
        return not self.is_written or self.reader_count > 0


class Load(msgspec.Struct, eq=False):
    """Pages that are being read. For those that wait it is one more who fills a prefix."""

    id: int
    key: SequenceKey
    tree: Tree
    anchor: Node
    pages: Pages
    tokens: bytes
    """Packed ids of these pages."""
    tokens_first: int
    records: list[Record]
    first_page: int
    """How many pages of the prefix come before."""
    order: Order = FIRST  # so that everybody may wait for the disk
    incarnation: int = PAGER
    prompt_pages: int = 0
    place: tuple[Node, bytes] | None = None
    is_unwanted: bool = False
    """Its root was retired meanwhile."""

    @property
    def committed_pages(self) -> int:
        return self.anchor.depth

    @property
    def may_fill(self) -> bool:
        return not self.is_unwanted

    def known_from(self, position: int) -> bytes:
        return self.tokens[4 * (position - self.tokens_first) :]


@dataclass(slots=True)
class TierCounts:
    """What happened so far, in pages."""

    stored: int = 0
    loaded: int = 0
    corrupt: int = 0
    evicted: int = 0
    not_stored: int = 0
    """Left the pool while the buffer was full, or every slot busy."""
    declined: int = 0
    """Were on disk, and computed since that was quicker."""


class DiskTier:
    """The slots of an open disk. ``staged_pages_max``: how many pages may wait to be written."""

    def __init__(self, facts: PoolFacts, found: DiskFound, staged_pages_max: int) -> None:
        self._width = facts.page_token_bytes
        self.slot_count = found.slot_count
        self.staged_pages_max = staged_pages_max
        self.staged: dict[int, Record] = {}
        """By slot: what is being written."""
        self.loading_pages = 0
        self.cost = FetchCost(facts.page_bytes, facts.page_size)
        self.counts = TierCounts()
        # Not a plain dict: finding its first key is linear after removals at the front.
        self._records: OrderedDict[int, Record] = OrderedDict()
        """By chain key, the least recently used first."""
        self._dropped_busy: dict[int, Record] = {}
        """By slot: forgotten, and in use still."""
        records = found.records
        columns = (records.chains.tolist(), records.slots.tolist(), records.root_indexes.tolist())
        used = bytearray(found.slot_count)
        for chain, slot, root_index in zip(*columns, strict=True):
            root = records.roots[root_index]
            before = self._records.pop(chain, None)  # written twice: the newer one counts
            if before is not None:
                used[before.slot] = 0
            self._records[chain] = Record(chain, slot, root, True)
            used[slot] = 1
        self._free = [slot for slot in range(found.slot_count - 1, -1, -1) if not used[slot]]

    @property
    def page_count(self) -> int:
        """Pages that can be found."""
        return len(self._records)

    @property
    def staged_room(self) -> int:
        """How many pages more may wait to be written."""
        return max(0, self.staged_pages_max - len(self.staged))

    # Looking

    def find(self, chain: int) -> Record | None:
        return self._records.get(chain)

    def of(self, roots: Container[bytes]) -> list[Record]:
        """What can be found of any of ``roots``; this looks at every page."""
        return [record for record in self._records.values() if record.root in roots]

    def roots(self) -> set[bytes]:
        """The roots of what can be found; this looks at every page."""
        return {record.root for record in self._records.values()}

    def run(self, root: bytes, start: int, tokens: bytes, at: int, pages_max: int) -> list[Record]:
        """The longest run of pages that can be read now: those of ``tokens[at:]``, after the
        page whose chain key is ``start``."""
        found: list[Record] = []
        for chain in chain_keys(start, tokens, at, at + pages_max * self._width, self._width):
            record = self._records.get(chain)
            if record is None or record.is_busy or record.root != root:
                break
            found.append(record)
        return found

    # Changing

    def touch(self, records: Iterable[Record]) -> None:
        """``records``, a chain from its start, were used just now. The last goes first, since
        it is of no use without the others."""
        for record in reversed(list(records)):
            self._records.move_to_end(record.chain)

    def claim(self, chains: list[int], root: bytes) -> tuple[list[int], list[int]]:
        """Slots for those pages of a chain that are not there yet, in place of the least recently
        used if need be: which of ``chains`` they are, and the slots. The last come first, since
        they are the first that can be spared; fewer than wanted when too much waits to be written,
        or every slot is busy."""
        records, staged, free = self._records, self.staged, self._free
        places: list[int] = []
        slots: list[int] = []
        for place in range(len(chains) - 1, -1, -1):
            chain = chains[place]
            if chain in records:
                records.move_to_end(chain)
                continue
            slot: int | None = None
            if len(staged) < self.staged_pages_max:
                slot = free.pop() if free else self._evict()
            if slot is None:
                self.counts.not_stored += sum(one not in records for one in chains[: place + 1])
                break
            records[chain] = staged[slot] = Record(chain, slot, root, False)
            places.append(place)
            slots.append(slot)
        return places, slots

    def written(self, slots: Sequence[int]) -> list[int]:
        """``slots`` are written. Returns those that nobody wants any more."""
        unwanted: list[int] = []
        staged = self.staged
        for slot in slots:
            record = staged.pop(slot)
            record.is_written = True
            if record.is_dropped:
                unwanted.append(slot)
                self._let_go(record)
        self.counts.stored += len(slots) - len(unwanted)
        return unwanted

    def hold(self, records: Iterable[Record]) -> None:
        """``records`` are being read."""
        for record in records:
            record.reader_count += 1

    def release(self, records: Iterable[Record]) -> None:
        """``records`` are not being read any more."""
        for record in records:
            record.reader_count -= 1
            if record.is_dropped:
                self._let_go(record)

    def drop(self, record: Record) -> None:
        """Forget ``record``, which can be found so far."""
        del self._records[record.chain]
        record.is_dropped = True
        self._dropped_busy[record.slot] = record
        self._let_go(record)

    def _let_go(self, record: Record) -> None:
        if not record.is_busy:
            del self._dropped_busy[record.slot]
            self._free.append(record.slot)

    def _evict(self) -> int | None:
        for looked, record in enumerate(self._records.values()):
            if not record.is_busy:
                del self._records[record.chain]
                record.is_dropped = True
                self.counts.evicted += 1
                return record.slot
            if looked >= _LOOK_MAX:
                break
        return None

    # Checking

    def check(self) -> None:
        """Raise ``AssertionError`` unless every slot is free or has one record."""
        records = [*self._records.values(), *self._dropped_busy.values()]
        slots = [record.slot for record in records] + self._free
        assert sorted(slots) == list(range(self.slot_count)), "a slot is lost, or used twice"
        staged = {record.slot: record for record in records if not record.is_written}
        assert staged == self.staged and len(staged) <= self.staged_pages_max
        assert all(record.is_busy and record.is_dropped for record in self._dropped_busy.values())
        for chain, record in self._records.items():
            assert record.chain == chain and not record.is_dropped


# Chain keys


def root_chain(root: bytes) -> int:
    """Where the chain keys of a tree start."""
    return int.from_bytes(root[:8], "little")


def chain_keys(start: int, tokens: bytes, at: int, end: int, width: int) -> Iterator[int]:
    """A key for each page, of ``width`` bytes, of ``tokens[at:end]``; ``start``: the key of the
    page before."""
    chain = start
    for first in range(at, end - width + 1, width):
        chain = xxh3_64_intdigest(tokens[first : first + width], chain)
        yield chain


def chain_over(start: int, tokens: bytes, at: int, end: int, width: int) -> int:
    """The last of ``chain_keys``; ``start`` when there is none."""
    chain = start
    for first in range(at, end - width + 1, width):
        chain = xxh3_64_intdigest(tokens[first : first + width], chain)
    return chain


def chain_at(node: Node, root: bytes, width: int) -> int:
    """The chain key at the end of ``node``. It is kept there: edges only grow at their end, and
    whoever takes pages from one forgets its key (``Node.chain``)."""
    above: list[Node] = []
    while not node.is_root and (node.chain is None or node.chain[0] != node.depth):
        above.append(node)
        node = node.parent
    chain = root_chain(root) if node.is_root or node.chain is None else node.chain[1]
    for edge in reversed(above):
        at = 0
        known = edge.chain
        if known is not None and known[0] > edge.depth - len(edge.pages):  # it has grown since
            at = len(edge.tokens) - (edge.depth - known[0]) * width
            chain = known[1]
        chain = chain_over(chain, edge.tokens, at, len(edge.tokens), width)
        edge.chain = (edge.depth, chain)
    return chain
