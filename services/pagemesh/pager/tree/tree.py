"""One prefix tree of the forest (``radix``): which model and tenant it is for, and its use."""

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
    """The model of its last admission, or else of a declared lease; empty: unknown."""
    terms: CacheTerms = NO_TERMS
    is_retired: bool = False
    has_left: bool = False
    """For a retired tree: a lease that ended left idle nodes, so it must be swept again."""

    @property
    def tenant(self) -> str:
        """The label of its tenant; empty: unknown."""
        return self.terms.tenant

    @property
    def is_unused(self) -> bool:
        return not self.lease_count and not self.root.children

    @property
    def is_spare(self) -> bool:
        """Whether no lease and no pin uses it: dropping it would only cost time."""
        return not self.lease_count and not self.pin_count
