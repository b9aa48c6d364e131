"""Least frequently used first; the longest unused of these."""

from __future__ import annotations

from pagemesh.pager.eviction.leaves import LeafQueues
from pagemesh.pager.tree.node import Node

USES_MAX = 31
"""Counting ends here: beyond it, age alone decides."""


class Lfu(LeafQueues):
    """A queue for each count of uses, counted while a node is cached."""

    def __init__(self) -> None:
        super().__init__(USES_MAX + 1)

    def add(self, node: Node) -> None:
        if node.note is None:
            node.note = 0
        super().add(node)

    def remove(self, node: Node) -> None:
        super().remove(node)
        node.note = min(USES_MAX, node.note + 1)

    def cut(self, upper: Node, lower: Node) -> None:
        if lower.note is not None:
            # An idle edge is used in its upper part just now; a used one was counted.
            upper.note = min(USES_MAX, lower.note + (not lower.pins))
