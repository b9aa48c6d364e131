"""Why a prefix is not cached any more, for the hit waterfall.

What leaves the tree leaves marks: 60-bit hashes (of XXH3) of everything from the root to the end of
some of its pages, with the reason. They are chained: each goes on from the one before, and the
first from the hash of the path to the run, which goes on from block to block.

    root ------ path ------> [ 0 | 1 | 2 | 3 | 4 | 5 | 6 ]   run of pages that left
     | 256  | 256  |  ..     1   2       4           7       marks after so many

A prompt is looked up from where its match ends, mark by mark. So what is told has left indeed,
up to one hash in 2**52 or more; what a prompt shares only in part with a run is told to the last
mark, at least half of it. Marks are kept in a table of fixed size; a newer one takes the place of
an older one, which is then forgotten. Nothing is decided by them.

    mark:   40 bits of the hash | 17: pages of the run | 3: why        8 bytes, at the place that
                                                                       the hash's last bits say
"""

from __future__ import annotations

from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.radix import Forest, Match, Node

_MARK_COUNT_MIN, _MARK_COUNT_MAX = 1 << 12, 1 << 16
_PAGES_PER_MARK = 2
"""A run of 8 pages leaves 4 marks, one of 128 leaves 8: the marks of a small pool that is full of
short runs stand for as many pages as it has, those of others for more."""
_PATHS_MAX = 1_024
"""What is hashed up to edges above those that left lately is kept for the next of them."""
_BLOCK_PAGES = 256
_PATH: Final = 1
"""Told apart from marks: paths go on with this bit of the hash before turned."""
_CHAINS_MAX = 64
"""The hashes of all blocks up to edges that left in part lately are kept for when more does."""
_RUNS_MAX = 32
"""Runs that one prompt is followed through."""
_CODE_BITS: Final = 3
_NOTE_BITS: Final = 20
_NOTE: Final = (1 << _NOTE_BITS) - 1
_KEY: Final = (1 << 60) - 1
"""What is taken of a digest: compiled code keeps up to 62 bits in a register."""
_HASH: Final = _KEY - _NOTE
_NOTED_PAGES_MAX = _NOTE >> _CODE_BITS
_REASONS = {why: code for code, why in enumerate(Why, start=1)}
_WHY = {code: why for why, code in _REASONS.items()}


def mark_count_for(page_count: int) -> int:
    """How many marks a pool of so many pages is worth."""
    wanted = page_count // _PAGES_PER_MARK
    return max(_MARK_COUNT_MIN, min(1 << wanted.bit_length() >> 1, _MARK_COUNT_MAX))


class Departed:
    """The marks of what left ``forest``, of pages of ``page_size`` tokens. ``mark_count`` is a
    power of two."""

    def __init__(self, forest: Forest, page_size: int, mark_count: int) -> None:
        self._forest = forest
        self._width = 4 * page_size
        self._block_bytes = _BLOCK_PAGES * self._width
        self._mask = mark_count - 1
        # Zeros take no memory before they are written to; views are quicker with single items.
        self._marks = np.zeros(mark_count, np.uint64).data
        self._is_empty = True
        self._paths: dict[Node, tuple[int, int]] = {}
        """The depth of an edge above what left lately, and the hash up to its end. Edges only grow
        at that end, and one that gets shorter is forgotten."""
        self._chains: dict[Node, list[int]] = {}
        """The hash of nothing and those up to the end of each block, of an edge that got shorter.
        Blocks are counted from the root, wherever edges are cut."""

    def leaving(self, node: Node, page_count: int, why: Why) -> None:
        """The last ``page_count`` pages of ``node`` leave the tree (a ``Leaver``)."""
        width = self._width
        at = len(node.tokens) - page_count * width
        self._paths.pop(node, None)
        if at:
            key = self._kept_key(node, node.depth - page_count)
        else:
            key = self._path(node.parent, self._chains.pop(node, None))
        note = min(page_count, _NOTED_PAGES_MAX) << _CODE_BITS | _REASONS[why]
        self._is_empty = False
        marks, mask = self._marks, self._mask
        done = 0
        while done < page_count:
            end = min(max(1, 2 * done), page_count)
            key = _hash(node.tokens[at + done * width : at + end * width], key)
            marks[key & mask] = key & _HASH | note
            done = end

    def _path(self, node: Node, below: list[int] | None) -> int:
        """The hash of all tokens from the root to the end of ``node``. ``below``: the hashes of
        blocks up to an edge below it that is gone; ``node`` may be the next to go."""
        if below is not None and node.depth >= _BLOCK_PAGES and node not in self._chains:
            if len(self._chains) >= _CHAINS_MAX:
                self._chains.clear()
            self._chains[node] = below[: node.depth // _BLOCK_PAGES + 1]
        known = self._paths.get(node)
        if known is not None and known[0] == node.depth:
            return known[1]
        key = self._kept_key(node, node.depth)
        if len(self._paths) >= _PATHS_MAX:
            self._paths.clear()
        if node.depth:  # nobody says when a root is gone
            self._paths[node] = (node.depth, key)
        return key

    def _kept_key(self, node: Node, depth: int) -> int:
        """The hash up to ``depth`` in ``node``, where that is about to end. A long edge that
        leaves bit by bit is hashed once, and then a block at most each time."""
        chain = self._chains.get(node)
        if chain is None or len(chain) <= depth // _BLOCK_PAGES:
            chain = self._chain(node)
            if len(chain) > 1:
                if len(self._chains) >= _CHAINS_MAX:
                    self._chains.clear()
                self._chains[node] = chain
        del chain[depth // _BLOCK_PAGES + 1 :]
        return self._key(node, depth, chain)

    def _key(self, node: Node, depth: int, chain: list[int]) -> int:
        """The hash up to ``depth`` in ``node``, of whose blocks ``chain`` has the hashes."""
        block = depth // _BLOCK_PAGES
        rest = _tokens(node, block * _BLOCK_PAGES, depth, self._width)
        return _hash(rest, chain[block] ^ _PATH) if rest else chain[block]

    def _chain(self, node: Node) -> list[int]:
        """The hash of nothing, and those up to the end of each block above the end of ``node``."""
        key = _seed(self._forest.tree_of(node).digest)
        chain = [key]
        whole = node.depth // _BLOCK_PAGES * _BLOCK_PAGES
        if whole:
            tokens, size = memoryview(_tokens(node, 0, whole, self._width)), self._block_bytes
            for at in range(0, len(tokens), size):
                key = _hash(tokens[at : at + size], key ^ _PATH)
                chain.append(key)
        return chain

    def lost_pages(
        self, root: bytes, tokens: bytes, match: Match, pages_max: int
    ) -> list[tuple[Why, int]]:
        """Why the pages of ``tokens`` after ``match``, up to ``pages_max`` in all, are not cached,
        as far as that is known: reasons and page counts, in order."""
        lost: list[tuple[Why, int]] = []
        if self._is_empty:
            return lost
        width = self._width
        first, path, hashed, view = match.pages, 0, -1, memoryview(tokens)
        known = None if match.edge_pages else self._paths.get(match.node)
        for _ in range(_RUNS_MAX):
            if first >= pages_max:
                break
            at = first * width
            if known is not None and known[0] == first:
                key = known[1]
            else:
                if hashed < 0:
                    path, hashed = _seed(root), 0
                while (end := hashed + self._block_bytes) <= at:
                    path, hashed = _hash(view[hashed:end], path ^ _PATH), end
                key = _hash(view[hashed:at], path ^ _PATH) if at > hashed else path
            key = _hash(tokens[at : at + width], key)
            note = self._note(key)
            if not note:
                break
            done, count = 1, min(note >> _CODE_BITS, pages_max - first)
            while done < count:
                end = min(2 * done, count)
                key = _hash(tokens[at + done * width : at + end * width], key)
                if not self._note(key):
                    break
                done = end
            lost.append((_WHY[note & ((1 << _CODE_BITS) - 1)], done))
            first += done
        return lost

    def _note(self, key: int) -> int:
        """What is noted of ``key``; 0: nothing."""
        mark = self._marks[key & self._mask]
        return 0 if (mark ^ key) >> _NOTE_BITS else mark & _NOTE

    def check(self) -> None:
        """Raise ``AssertionError`` unless each path that is kept has the hash of its tokens."""
        assert len(self._paths) <= _PATHS_MAX
        for node, (depth, key) in self._paths.items():
            own = self._key(node, node.depth, self._chain(node))
            assert depth != node.depth or key == own, "another path's hash"
        assert len(self._chains) <= _CHAINS_MAX
        for node, chain in self._chains.items():
            assert chain == self._chain(node)[: len(chain)], "another path's blocks"


def _tokens(node: Node, start: int, stop: int, width: int) -> bytes | memoryview:
    """The packed tokens between two depths, of which ``stop`` is in ``node`` or at its end."""
    parts, first = [], node.depth - len(node.pages)
    while stop > start:
        at = max(start - first, 0) * width
        parts.append(memoryview(node.tokens)[at : (stop - first) * width])
        stop, node = first, node.parent
        first = node.depth - len(node.pages)
    return parts[0] if len(parts) == 1 else b"".join(reversed(parts))


def _hash(data: bytes | memoryview, key: int) -> int:
    """Of ``data``, going on from ``key``."""
    digest: int = xxh3_64_intdigest(data, key)
    return digest & _KEY


def _seed(root: bytes) -> int:
    return int.from_bytes(root[:8], "little") & _KEY
