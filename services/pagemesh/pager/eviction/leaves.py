"""Queues of idle nodes whose first leaf is found in amortised constant time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from pagemesh.pager.tree.node import UNLINKED, Link, Node

NEWEST_MAX: Final = 8
"""How many of the newest nodes are searched for a leaf: when a leaf becomes idle, the edges above
it often do so after it, and are newer."""


class LeafQueue(Link):
    """A queue in the order of ``add``. A node that reaches the front and is no idle leaf is put
    aside. ``recall`` brings it back to the front: nothing still in the queue is older.

        queue <-> oldest <-> ... <-> newest <-> queue     a ring, linked by ``older`` and ``newer``

    A node contains its links, so being in a queue takes no memory, and it is in one queue at most.
    A node that was put aside is a ring of one; a node in no queue links to ``UNLINKED``."""

    __slots__ = ()

    def add(self, node: Node) -> None:
        """Put ``node`` last. Raises ``AssertionError`` when it is in a queue, or put aside."""
        assert node.newer is UNLINKED, "it is in a queue"
        last = self.older
        node.older, node.newer = last, self
        last.newer = self.older = node

    def remove(self, node: Node) -> None:
        """Take out ``node``, queued or put aside. Raises ``AssertionError`` if it is in none."""
        older, newer = node.older, node.newer
        assert newer is not UNLINKED, "it is in no queue"
        older.newer, newer.older = newer, older
        node.older = node.newer = UNLINKED

    def recall(self, node: Node) -> None:
        """``node``, which is queued or put aside, has become an idle leaf."""
        if node.newer is node:
            first = self.newer
            node.older, node.newer = self, first
            first.older = self.newer = node

    def first(self) -> Node | None:
        """The oldest idle leaf, if any. Puts aside the nodes before it."""
        node = self.newer
        while isinstance(node, Node):  # until the ring returns to the queue itself
            if not node.children and not node.pins:
                return node
            self.remove(node)
            node.older = node.newer = node
            node = self.newer
        return None

    def last(self) -> Node | None:
        """The newest idle leaf, if one is among the ``NEWEST_MAX`` newest nodes."""
        node = self.older
        for _ in range(NEWEST_MAX):
            if not isinstance(node, Node):
                return None
            if not node.children and not node.pins:
                return node
            node = node.older
        return None

    def __iter__(self) -> Iterator[Node]:
        return (node for node in self.nodes() if not node.children and not node.pins)

    def nodes(self) -> Iterator[Node]:
        """All queued nodes, the oldest first."""
        node = self.newer
        while isinstance(node, Node):
            yield node
            node = node.newer


class LeafQueues:
    """The base of policies that evict the first leaf of the first queue that has one. The ``note``
    of a node is the index of its queue."""

    def __init__(self, queue_count: int) -> None:
        self._queues = [LeafQueue() for _ in range(queue_count)]

    def add(self, node: Node) -> None:
        self._queues[node.note].add(node)

    def remove(self, node: Node) -> None:
        self._queues[node.note].remove(node)

    def forget(self, node: Node) -> None:
        if not node.pins:
            self.remove(node)

    def shrink(self, node: Node, keep: int) -> None:
        if not keep:
            self._queues[node.note].remove(node)
            parent = bared(node)
            if parent is not None:
                self._queues[parent.note].recall(parent)

    def tidy(self) -> None:
        pass  # nothing is put off

    def close(self) -> None:
        pass  # nothing is shared

    def victim(self) -> tuple[Node, int]:
        for queue in self._queues:
            node = queue.first()
            if node is not None:
                return node, len(node.pages)
        raise LookupError("nothing is idle")

    def __iter__(self) -> Iterator[Node]:
        return chain.from_iterable(self._queues)

    def check(self, nodes: Iterable[Node]) -> None:
        idle = [node for node in nodes if not node.pins]
        check_queued([(node, self._queues[node.note]) for node in idle], self._queues)


def check_queued(places: Iterable[tuple[Node, LeafQueue]], queues: Iterable[LeafQueue]) -> None:
    """Raise ``AssertionError`` unless each node of ``places`` is in its queue, or was put aside and
    is no idle leaf, and no other node is in any of ``queues``."""
    found: dict[Node, LeafQueue] = {}
    for queue in queues:
        last: Link = queue
        for node in queue.nodes():
            assert node not in found and node.older is last, "a queue is torn"
            found[node], last = queue, node
        assert queue.older is last, "a queue is torn"
    for node, queue in places:
        if node in found:
            assert found.pop(node) is queue, "it is in another's queue"
        else:
            assert node.older is node is node.newer, "it is in no queue"
            assert node.children or node.pins, "an idle leaf was put aside"
    assert not found, "what is in use, or gone, waits in a queue"


def bared(node: Node) -> Node | None:
    """The parent of ``node``, which was just removed, if that made the parent an idle leaf."""
    parent = node.parent
    return None if parent.is_root or parent.pins or parent.children else parent
