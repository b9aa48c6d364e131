"""One prefix tree of the forest (``radix``): whose it is, and who uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagemesh.wire.cache_terms import NO_TERMS, CacheTerms

if TYPE_CHECKING:
    from pagemesh.pager.tree.radix import Node


@dataclass(slots=True)
class Tree:
    """The tree of one root digest; ``index`` is its place in the pool's root table."""

    index: int
    digest: bytes
    root: Node
    lease_count: int = 0
    pin_count: int = 0
    model: str = ""
    """Whose it is, as its last admission said; empty: not said in this life of the pager."""
    terms: CacheTerms = NO_TERMS
    is_retired: bool = False
    has_left: bool = False
    """Something of it, retired, was left idle when its last user ended: it is to be swept again."""

    @property
    def tenant(self) -> str:
        """A label; empty: not said."""
        return self.terms.tenant

    @property
    def is_unused(self) -> bool:
        return not self.lease_count and not self.root.children

    @property
    def is_spare(self) -> bool:
        """Nobody would miss more than time."""
        return not self.lease_count and not self.pin_count
