"""What a policy is told and asked.

The tree tells of its edges (*nodes*) as they become idle, when nothing refers to them or to
what is below them:

    add -----> idle -----> remove       it is in use again
               |  ^
        shrink |  `------- some of its pages are gone
               `---------> gone         all of them are

Whatever it is, a node may go to the policy of another account (``forget``); that one is then told
of it, if it is idle, as of a new one.

A node becomes idle only after all nodes below it, and only leaves may be named as victims. A
parent that loses its last child is a leaf from then on, without another ``add``.

What a policy makes of ``add`` and ``remove``, which every request brings, it may put off until it
is asked for a victim, or told to ``tidy``: that is what an edge is cut after.

Policies take no clock. What has a lifetime in milliseconds is dropped by whoever knows the time;
what must stay is pinned in the tree, so that the ledger does not count it as room.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from pagemesh.pager.tree.node import Node


class EvictionPolicy(Protocol):
    """Keeps the idle nodes and names the next to go. ``note``, ``older`` and ``newer`` of a node
    are the policy's own, and as in a new node when it is first told of it; it changes nothing else.
    """

    def add(self, node: Node) -> None:
        """``node`` became idle, after everything below it."""

    def remove(self, node: Node) -> None:
        """``node``, idle so far, is in use again."""

    def forget(self, node: Node) -> None:
        """``node``, idle or in use, is no business of this policy any more. Told of all nodes of a
        tree, those below first; then comes ``tidy``, and notes are taken away."""

    def cut(self, upper: Node, lower: Node) -> None:
        """``upper``, new and in use, now has the first pages of ``lower``. If ``lower`` was
        idle it still is, with the others."""

    def shrink(self, node: Node, keep: int) -> None:
        """The idle leaf ``node`` is about to lose all but its first ``keep`` pages. With 0 it
        goes, and its parent has lost it already."""

    def tidy(self) -> None:
        """Take in what was told and put off. Before edges are cut, before notes are taken away, and
        once in a while."""

    def victim(self) -> tuple[Node, int]:
        """An idle leaf, and how many pages may go from its end. Raises ``LookupError`` when
        nothing is idle."""

    def __iter__(self) -> Iterator[Node]:
        """Every idle leaf."""

    def check(self, nodes: Iterable[Node]) -> None:
        """Raise ``AssertionError`` unless what is noted is right for ``nodes``, all of its trees
        but their roots. Looking changes nothing: what was put off still is."""
