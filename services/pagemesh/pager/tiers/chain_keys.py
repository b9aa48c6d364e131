"""Chain keys: a 64-bit hash of all tokens from the root to the end of a page.

The disk tier finds pages by them. One is made in a fraction of a microsecond a page, from that of
the page before.
"""

from __future__ import annotations

from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from pagemesh.pager.tree.radix import Node


def root_chain(root: bytes) -> int:
    """Where the chain keys of a tree start."""
    return int.from_bytes(root[:8], "little")


def chain_keys(start: int, tokens: bytes, at: int, end: int, width: int) -> Iterator[int]:
    """A key for each page, of ``width`` bytes, of ``tokens[at:end]``; ``start``: the key of the
    page before."""
    chain = start
    for first in range(at, end - width + 1, width):
        chain = xxh3_64_intdigest(tokens[first : first + width], chain)
        yield chain


def chain_over(start: int, tokens: bytes, at: int, end: int, width: int) -> int:
    """The last of ``chain_keys``; ``start`` when there is none."""
    chain = start
    for first in range(at, end - width + 1, width):
        chain = xxh3_64_intdigest(tokens[first : first + width], chain)
    return chain


def chain_at(node: Node, root: bytes, width: int) -> int:
    """The chain key at the end of ``node``. It is kept there: edges only grow at their end, and
    whoever takes pages from one forgets its key (``Node.chain``)."""
    above: list[Node] = []
    while not node.is_root and (node.chain is None or node.chain[0] != node.depth):
        above.append(node)
        node = node.parent
    chain = root_chain(root) if node.is_root or node.chain is None else node.chain[1]
    for edge in reversed(above):
        at = 0
        known = edge.chain
        if known is not None and known[0] > edge.depth - len(edge.pages):  # it has grown since
            at = len(edge.tokens) - (edge.depth - known[0]) * width
            chain = known[1]
        chain = chain_over(chain, edge.tokens, at, len(edge.tokens), width)
        edge.chain = (edge.depth, chain)
    return chain
