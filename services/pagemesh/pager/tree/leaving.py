"""What leaves the prefix tree, and why: one way out, and who wants to know.

    evicted       its pages were wanted for something else
    expired       its time was over
    quota         its tenant had more than its share
    invalidated   somebody said that it is not to be used any more, or a lease was released
                  with nothing of it to be kept

Whatever takes pages out of a tree names one of them (``Forest.reuse``, ``trim``, ``strand``), and
every ``Leaver`` hears of it before anything has changed.
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

    __hash__ = object.__hash__  # members are single, and Enum's own is a call in Python


class Leaver(Protocol):
    """Hears what is about to leave."""

    def __call__(self, node: Node, page_count: int, why: Why) -> None:
        """The last ``page_count`` pages of the idle leaf ``node`` are about to leave. Node, pages,
        tokens and the path above are as they were; nothing of them may be changed here, and
        ``pages`` may belong to somebody else as soon as this returns."""
