"""The protocol of eviction policies.

The tree notifies its policy of edges (*nodes*) that become idle, which they are when nothing refers
to them or to anything below them:

    add -----> idle -----> remove       it is in use again
               |  ^
        shrink |  `------- some of its pages are gone
               `---------> gone         all of them are

A node, idle or not, may move to the policy of another account (``forget``), which is then told of
it as of a new node if it is idle.

A node becomes idle only after all nodes below it, and only leaves may be named as victims. A parent
that loses its last child is a leaf from then on, without another ``add``.

Every request causes ``add`` and ``remove``. A policy may put off their processing until it is asked
for a victim or told to ``tidy``, which also happens before an edge is cut.

Policies have no clock. Pages with a time to live are dropped elsewhere (see ``tree.lifetime``), and
pages that must stay are pinned in the tree, so that the ledger does not count them as room.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from pagemesh.pager.tree.node import Node


class EvictionPolicy(Protocol):
    """Keeps track of idle nodes and names the next victim. A node's ``note``, ``older`` and
    ``newer`` belong to the policy, and are as in a new node when it is first notified of the node;
    it changes nothing else."""

    def add(self, node: Node) -> None:
        """``node`` became idle, after everything below it."""

    def remove(self, node: Node) -> None:
        """``node``, idle so far, is in use again."""

    def forget(self, node: Node) -> None:
        """``node``, idle or in use, leaves this policy. Called for all nodes of a tree, children
        before parents; then ``tidy`` is called, and notes are reset."""

    def cut(self, upper: Node, lower: Node) -> None:
        """The new node ``upper``, which is in use, has the first pages of ``lower`` from now on.
        If ``lower`` was idle it still is, with its other pages."""

    def shrink(self, node: Node, keep: int) -> None:
        """The idle leaf ``node`` is about to lose all but its first ``keep`` pages. If ``keep`` is
        0 it goes, and has been removed from its parent already."""

    def tidy(self) -> None:
        """Process notifications that were put off. Called before edges are cut, before notes are
        reset, and now and then."""

    def close(self) -> None:
        """Its account is gone, and so are all its nodes: give back what it shares with others."""

    def victim(self) -> tuple[Node, int]:
        """The idle leaf to evict from, and how many pages may go from its end. Raises
        ``LookupError`` when nothing is idle."""

    def __iter__(self) -> Iterator[Node]:
        """Every idle leaf."""

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise ``AssertionError`` unless the state is right for ``nodes``, which are all nodes of
        its trees except the roots. Changes nothing: what was put off stays so."""
