"""Least recently used first."""

from __future__ import annotations

from typing import TypeVar

from pagemesh.pager.eviction.leaves import LeafQueue
from pagemesh.pager.eviction.policy import Edge

N = TypeVar("N", bound=Edge)


class Lru(LeafQueue[N]):
    """Every operation is O(1). Nodes are told of children before parents, and used from the
    leaves' end up, so the first in order is always a leaf."""

    __slots__ = ()

    def cut(self, upper: N, lower: N) -> None:
        pass  # lower keeps its age

    def shrink(self, node: N, keep: int) -> None:
        if not keep:
            self.remove(node)

    def tidy(self) -> None:
        pass  # nothing is put off

    def victim(self) -> tuple[N, int]:
        node = self.newer
        if node is self:
            raise LookupError("nothing is idle")
        return node, len(node.pages)
