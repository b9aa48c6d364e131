"""What only less urgent requests used first; the longest unused of these."""

from __future__ import annotations

from pagemesh.pager.eviction.leaves import LeafQueues
from pagemesh.pager.tree.node import Node

RANK_MIN, RANK_MAX = -4, 4
"""A rank beyond these counts as the nearest of them."""


class Priority(LeafQueues):
    """A queue for each rank. The rank of a node when it becomes idle counts until it is used."""

    def __init__(self) -> None:
        super().__init__(RANK_MAX - RANK_MIN + 1)

    def add(self, node: Node) -> None:
        node.note = max(RANK_MIN, min(RANK_MAX, node.rank)) - RANK_MIN
        super().add(node)

    def cut(self, upper: Node, lower: Node) -> None:
        pass  # lower keeps its place
