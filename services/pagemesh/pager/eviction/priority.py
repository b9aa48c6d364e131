"""Edges that only less urgent requests used go first; of these, the longest unused."""

from __future__ import annotations

from pagemesh.pager.eviction.leaves import LeafQueues
from pagemesh.pager.tree.node import Node

RANK_MIN, RANK_MAX = -4, 4
"""Ranks beyond these are clamped."""


class Priority(LeafQueues):
    """One queue for each rank. The rank that a node has when it becomes idle applies until it is
    used again."""

    def __init__(self) -> None:
        super().__init__(RANK_MAX - RANK_MIN + 1)

    def add(self, node: Node) -> None:
        node.note = max(RANK_MIN, min(RANK_MAX, node.rank)) - RANK_MIN
        super().add(node)

    def cut(self, upper: Node, lower: Node) -> None:
        pass  # lower keeps its place
