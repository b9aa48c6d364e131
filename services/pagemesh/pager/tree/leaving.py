"""Why pages leave the prefix tree, and the protocol of those that are told.

    evicted       its pages were needed for something else
    expired       its lifetime was over
    quota         its tenant had more than its share
    invalidated   an operator invalidated it, or a lease was released on condition that none of its
                  pages stay cached

Everything that takes pages out of a tree (``Forest.reuse``, ``trim``, ``strand``) names one of
these reasons, and every ``Leaver`` is told before anything has changed.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pagemesh.pager.tree.radix import Node


class Why(enum.Enum):
    """Why pages left the tree."""

    EVICTED = "evicted"
    EXPIRED = "expired"
    QUOTA = "quota"
    INVALIDATED = "invalidated"

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is a Python call


class Leaver(Protocol):
    """A callback that is told of pages about to leave."""

    def __call__(self, node: Node, page_count: int, why: Why) -> None:
        """The last ``page_count`` pages of the idle leaf ``node`` are about to leave. The node, its
        pages and tokens and the path above are still unchanged, and must not be changed here. The
        pages may be given out anew as soon as this returns."""
