"""Least recently used first."""

from __future__ import annotations

from collections.abc import Iterable

from pagemesh.pager.eviction.leaves import LeafQueue, check_queued
from pagemesh.pager.tree.node import Node


class Lru(LeafQueue):
    """Every operation is O(1). Children become idle before their parents, and come into use before
    them too, so the oldest node is always a leaf."""

    __slots__ = ()

    def forget(self, node: Node) -> None:
        if not node.pins:
            self.remove(node)

    def cut(self, upper: Node, lower: Node) -> None:
        pass  # lower keeps its age

    def shrink(self, node: Node, keep: int) -> None:
        if not keep:
            self.remove(node)

    def tidy(self) -> None:
        pass  # nothing is put off

    def close(self) -> None:
        pass  # nothing is shared

    def victim(self) -> tuple[Node, int]:
        node = self.newer
        if not isinstance(node, Node):
            raise LookupError("nothing is idle")
        return node, len(node.pages)

    def check(self, nodes: Iterable[Node]) -> None:
        check_queued([(node, self) for node in nodes if not node.pins], [self])
