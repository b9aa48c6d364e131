"""One edge of a prefix tree (``radix``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pagemesh.pager.pages.runs import Pages
from pagemesh.pager.tree.lifetime import FOREVER_MS

if TYPE_CHECKING:
    from pagemesh.pager.tree.accounts import Account

UNRANKED = -(1 << 30)
"""The rank of an edge that no ended lease has used yet."""


class Link:
    """A link of a queue (see ``eviction.leaves``), which is a ring; at first a ring of one."""

    __slots__ = ("newer", "older")

    def __init__(self) -> None:
        self.older: Link = self
        self.newer: Link = self


UNLINKED: Final = Link()
"""The neighbour of a node that is in no queue."""


class Node(Link):
    """An edge and the node it leads to. ``depth``: pages from the root to its end; ``rank``: the
    highest of the leases that used it. ``note`` and the links belong to its eviction policy."""

    __slots__ = (
        "account", "chain", "children", "depth", "expires_ms", "note", "pages", "parent", "pins",
        "rank", "tokens", "uses",
    )  # fmt: skip

    def __init__(self, parent: Node | None, tokens: bytes, pages: Pages) -> None:
        self.older = self.newer = UNLINKED
        self.parent: Node = parent or self  # the root is its own parent
        if parent is not None:
            self.account: Account = parent.account  # a root gets one when it is planted
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Node] = _NO_CHILDREN  # changed only by the two methods below
        self.pins = 0
        self.rank = 0
        self.uses = 0  # admissions whose match ended here
        self.note: Any = None
        self.chain: tuple[int, int] | None = None  # for the disk tier: a depth, and its key
        self.expires_ms = FOREVER_MS  # applies while it is idle; see ``lifetime``
        self.depth: int = (parent.depth if parent else 0) + len(pages)

    @property
    def is_root(self) -> bool:
        return self.parent is self

    def path(self) -> bytes:
        """The tokens from the root to its end, packed."""
        parts: list[bytes] = []
        node = self
        while not node.is_root:
            parts.append(node.tokens)
            node = node.parent
        return b"".join(reversed(parts))

    def put_child(self, first_page: bytes, child: Node) -> None:
        """Add ``child``, which starts where this node ends, with ``first_page``."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[first_page] = child

    def lose_child(self, first_page: bytes) -> None:
        """Remove the child that starts with ``first_page``."""
        del self.children[first_page]
        if not self.children:
            self.children = _NO_CHILDREN

    def below(self) -> Iterator[Node]:
        """Every node below this one, each before its children."""
        open_nodes = list(self.children.values())
        while open_nodes:
            node = open_nodes.pop()
            yield node
            open_nodes.extend(node.children.values())


_NO_CHILDREN: Final[dict[bytes, Node]] = {}
"""Shared by all leaves, which most edges are; always empty."""
