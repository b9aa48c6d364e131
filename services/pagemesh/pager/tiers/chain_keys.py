"""Chain keys: a 64-bit hash of all tokens from the root to the end of a page.

The disk tier finds pages by them. Each is computed in a fraction of a microsecond from the key of
the page before. Where a tree's keys start is a secret of the mesh: the hash is not cryptographic,
so whoever knew the start could find tokens for any key.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from pagemesh.pager.tree.radix import Node

_ROOTS_MAX = 4_096
_EDGES_MAX = 64


@functools.lru_cache(maxsize=_ROOTS_MAX)
def root_chain(key: bytes, root: bytes) -> int:
    """Where the chain keys of a tree start, which nobody without ``key`` can tell."""
    start = hashlib.blake2b(root, digest_size=8, key=key).digest()
    return int.from_bytes(start, "little")


def chain_keys(start: int, tokens: bytes, at: int, end: int, width: int) -> Iterator[int]:
    """The keys of the pages in ``tokens[at:end]``, each of ``width`` bytes; ``start``: the key of
    the page before."""
    chain = start
    for first in range(at, end - width + 1, width):
        chain = xxh3_64_intdigest(tokens[first : first + width], chain)
        yield chain


def chain_over(start: int, tokens: bytes, at: int, end: int, width: int) -> int:
    """The last of ``chain_keys``; ``start`` if there is none."""
    chain = start
    for first in range(at, end - width + 1, width):
        chain = xxh3_64_intdigest(tokens[first : first + width], chain)
    return chain


def chain_at(node: Node, start: int, width: int) -> int:
    """The chain key at the end of ``node``, in a tree whose keys start at ``start``. It is cached
    in ``Node.chain``: edges grow only at their end, and whoever takes pages from one clears it."""
    above: list[Node] = []
    while not node.is_root and (node.chain is None or node.chain[0] != node.depth):
        above.append(node)
        node = node.parent
    chain = start if node.is_root or node.chain is None else node.chain[1]
    for edge in reversed(above):
        at = 0
        known = edge.chain
        if known is not None and known[0] > edge.depth - len(edge.pages):  # it has grown since
            at = len(edge.tokens) - (edge.depth - known[0]) * width
            chain = known[1]
        chain = chain_over(chain, edge.tokens, at, len(edge.tokens), width)
        edge.chain = (edge.depth, chain)
    return chain


class EdgeChains:
    """Chain keys of edges: one that leaves the pool bit by bit from its end is hashed only once."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._kept: dict[Node, tuple[int, list[int]]] = {}
        """By edge: how deep it begins, and the keys of the page before it and of its own pages, as
        far as they were asked for."""

    def of(self, node: Node, start: int) -> list[int]:
        """The keys of the page before ``node`` and of its own pages, in a tree whose keys start at
        ``start``. The caller must not change the list."""
        first = node.depth - len(node.pages)
        kept = self._kept.get(node)
        if kept is None or kept[0] != first:  # it was split, and this is its end
            if len(self._kept) >= _EDGES_MAX:
                self._kept.clear()
            kept = self._kept[node] = first, [chain_at(node.parent, start, self._width)]
        chains, width = kept[1], self._width
        at = (len(chains) - 1) * width
        chains.extend(chain_keys(chains[-1], node.tokens, at, len(node.tokens), width))
        return chains

    def shorten(self, node: Node, page_count: int) -> None:
        """``node`` keeps only its first ``page_count`` pages, and may grow again."""
        if not page_count:
            self._kept.pop(node, None)
        elif (kept := self._kept.get(node)) is not None:
            del kept[1][page_count + 1 :]
