"""Why a prefix is no longer cached, for the hit waterfall.

Pages that leave the tree leave marks. A mark is a 60-bit hash (XXH3) of all tokens from the root to
the end of one of these pages, with the reason. Hashes are chained: each is seeded with the one
before, and the first with the hash of the path above the run, which itself is chained by blocks.

    root ------ path ------> [ 0 | 1 | 2 | 3 | 4 | 5 | 6 ]   run of pages that left
     | 256  | 256  |  ..     1   2       4           7       marks after so many pages

A prompt is looked up mark by mark from where its match ends. So pages that are reported did leave,
but for a hash collision (at most one in 2**52). If a prompt shares only part of a run, it is
reported up to the last mark in that part, which is at least half of it. Marks lie in a table of
fixed size, in which a newer mark overwrites an older one. They decide nothing.

    mark:   40 bits of the hash | 17: pages of the run | 3: why        8 bytes, at the index given
                                                                       by the hash's last bits
"""

from __future__ import annotations

from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.radix import Forest, Match, Node

_MARK_COUNT_MIN, _MARK_COUNT_MAX = 1 << 12, 1 << 16
_PAGES_PER_MARK = 2
"""A run of 8 pages leaves 4 marks, one of 128 leaves 8. So the table of a small pool covers about
as many pages as the pool has if all runs are short, and more if they are not."""
_PATHS_MAX = 1_024
"""How many path hashes are kept, each up to an edge below which another edge left recently."""
_BLOCK_PAGES = 256
_PATH: Final = 1
"""Keeps paths apart from marks: the seed of the next block has this bit of the hash flipped."""
_CHAINS_MAX = 64
"""For how many edges the hashes of all blocks are kept, after some of their pages left."""
_RUNS_MAX = 32
"""How many departed runs a prompt is followed through."""
_CODE_BITS: Final = 3
_NOTE_BITS: Final = 20
_NOTE: Final = (1 << _NOTE_BITS) - 1
_KEY: Final = (1 << 60) - 1
"""The part of a digest that is used: compiled code keeps up to 62 bits in a register."""
_HASH: Final = _KEY - _NOTE
_NOTED_PAGES_MAX = _NOTE >> _CODE_BITS
_REASONS = {why: code for code, why in enumerate(Why, start=1)}
_WHY = {code: why for why, code in _REASONS.items()}


def mark_count_for(page_count: int) -> int:
    """The size of the table for a pool of ``page_count`` pages: a power of two."""
    wanted = page_count // _PAGES_PER_MARK
    return max(_MARK_COUNT_MIN, min(1 << wanted.bit_length() >> 1, _MARK_COUNT_MAX))


class Departed:
    """The marks of pages that left ``forest``. A page has ``page_size`` tokens; ``mark_count`` must
    be a power of two."""

    def __init__(self, forest: Forest, page_size: int, mark_count: int) -> None:
        self._forest = forest
        self._width = 4 * page_size
        self._block_bytes = _BLOCK_PAGES * self._width
        self._mask = mark_count - 1
        # Zeros take no memory until written to; memoryviews are faster for single items.
        self._marks = np.zeros(mark_count, np.uint64).data
        self._is_empty = True
        self._paths: dict[Node, tuple[int, int]] = {}
        """For edges below which another left recently: the depth, and the hash up to the end. An
        edge only grows at that end; one that gets shorter is removed from here."""
        self._chains: dict[Node, list[int]] = {}
        """For edges that got shorter: the seed, then the hash up to the end of each block. Blocks
        are counted from the root, wherever edges are cut."""

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
        """The hash of all tokens from the root to the end of ``node``. ``below``: the chain of an
        edge below it that is gone, kept for ``node``, which may leave next."""
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
        if node.depth:  # not for a root, since nothing tells when it is gone
            self._paths[node] = (node.depth, key)
        return key

    def _kept_key(self, node: Node, depth: int) -> int:
        """The hash up to ``depth`` in ``node``, where that edge is about to end. A long edge that
        leaves bit by bit is hashed as a whole once, and then at most one block each time."""
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
        """The hash up to ``depth`` in ``node``; ``chain`` has the hashes of its blocks."""
        block = depth // _BLOCK_PAGES
        rest = _tokens(node, block * _BLOCK_PAGES, depth, self._width)
        return _hash(rest, chain[block] ^ _PATH) if rest else chain[block]

    def _chain(self, node: Node) -> list[int]:
        """The seed, then the hashes up to the end of each whole block, from the root to the end of
        ``node``."""
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
        """Why the pages of ``tokens`` after ``match`` are no longer cached, as far as is known:
        reasons and page counts, in order, up to a depth of ``pages_max``."""
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
        """The page count and reason noted for ``key``; 0: none."""
        mark = self._marks[key & self._mask]
        return 0 if (mark ^ key) >> _NOTE_BITS else mark & _NOTE

    def check(self) -> None:
        """Raise ``AssertionError`` unless every kept path and chain matches its tokens."""
        assert len(self._paths) <= _PATHS_MAX
        for node, (depth, key) in self._paths.items():
            own = self._key(node, node.depth, self._chain(node))
            assert depth != node.depth or key == own, "another path's hash"
        assert len(self._chains) <= _CHAINS_MAX
        for node, chain in self._chains.items():
            assert chain == self._chain(node)[: len(chain)], "another path's blocks"


def _tokens(node: Node, start: int, stop: int, width: int) -> bytes | memoryview:
    """The packed tokens between two depths; ``stop`` must be in ``node`` or at its end."""
    parts, first = [], node.depth - len(node.pages)
    while stop > start:
        at = max(start - first, 0) * width
        parts.append(memoryview(node.tokens)[at : (stop - first) * width])
        stop, node = first, node.parent
        first = node.depth - len(node.pages)
    return parts[0] if len(parts) == 1 else b"".join(reversed(parts))


def _hash(data: bytes | memoryview, key: int) -> int:
    """The hash of ``data``, seeded with ``key``."""
    digest: int = xxh3_64_intdigest(data, key)
    return digest & _KEY


def _seed(root: bytes) -> int:
    return int.from_bytes(root[:8], "little") & _KEY
