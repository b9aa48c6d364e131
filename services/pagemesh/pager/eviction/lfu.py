"""Least frequently used first; of these, the longest unused."""

from __future__ import annotations

from pagemesh.pager.eviction.leaves import LeafQueues
from pagemesh.pager.tree.node import Node

USES_MAX = 31
"""Counting stops here: beyond it, age alone decides."""


class Lfu(LeafQueues):
    """One queue for each number of uses since the node was cached."""

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
            # If the edge is idle, its upper part is being used now; else that was counted before.
            upper.note = min(USES_MAX, lower.note + (not lower.pins))
