"""Pages that are being read from disk into the pool."""

from __future__ import annotations

import msgspec

from pagemesh.pager.leases.waiting import FIRST
from pagemesh.pager.pages.runs import Pages
from pagemesh.pager.tiers.disk_shelves import Record
from pagemesh.pager.tree.radix import Node, Tree
from pagemesh.wire.messages import Order, SequenceKey

PAGER = 0
"""The writer of pages that the pager itself holds; no worker incarnation is 0."""


class Load(msgspec.Struct, eq=False):
    """Pages that are being read. To sequences that wait for a prefix, a load is like one that
    computes it."""

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
    begun_ms: int
    incarnation: int
    """Who fills the pages: the pager, or on a device the worker that asked."""
    order: Order = FIRST  # so that everybody may wait for the disk
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
