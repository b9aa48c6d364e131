"""What operators may ask of a pager: to inspect the cache, to pin, unpin and invalidate.

Every answer is bounded: a listing looks at ``_EDGES_MAX`` edges at most, however many there are.
Token ids go in (a prefix to pin) but never come out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from heapq import nlargest
from itertools import islice

import numpy as np

from pagemesh.pager.books import Books
from pagemesh.pager.pages.runs import last_of
from pagemesh.pager.retention.ages import Ages
from pagemesh.pager.retention.pins import Pin, Pins
from pagemesh.pager.retention.retiring import Retired, Retiring
from pagemesh.pager.retention.sweeps import Sweeps
from pagemesh.pager.tiers.tier_events import RetiredRoots
from pagemesh.pager.tiers.traffic import Tiers
from pagemesh.pager.tree.radix import Node, Tree
from pagemesh.wire.cache_messages import (
    LINES_MAX,
    AskCacheStats,
    AskCacheTop,
    AskCacheTree,
    CacheInvalidated,
    CacheLine,
    CacheStats,
    CacheTop,
    CacheTree,
    InvalidateCache,
    PinLine,
    PinPrefix,
    PrefixPinned,
    PrefixUnpinned,
    UnpinPrefix,
)
from pagemesh.wire.errors import Gone, Malformed

_EDGES_MAX = 20_000
_ROOT_DIGITS = 64
_NAMES_MAX = 20


class Door:
    """Handlers of ``wire.cache_messages``."""

    def __init__(
        self,
        books: Books,
        pins: Pins,
        retiring: Retiring,
        ages: Ages,
        tiers: Tiers,
        sweeps: Sweeps,
    ) -> None:
        self._books = books
        self._tiers = tiers
        self._sweeps = sweeps
        self._pins = pins
        self._retiring = retiring
        self._ages = ages
        self._page_size = books.facts.page_size

    # Looking

    def stats(self, _message: AskCacheStats) -> CacheStats:
        """The ledger, and what became of prompts and pages in this life."""
        books, pool, facts = self._books, self._books.pool, self._books.facts
        return CacheStats(
            host=facts.host,
            epoch=facts.epoch,
            page_size=facts.page_size,
            page_bytes=facts.page_bytes,
            total_pages=pool.total,
            free_pages=pool.free,
            held_pages=pool.held,
            pinned_pages=pool.pinned,
            idle_pages=pool.idle,
            draining_pages=pool.draining,
            root_count=len(books.forest.trees),
            retired_root_count=len(books.forest.retired),
            lease_count=len(books.leases),
            left_pages={why.value: count for why, count in books.forest.left_pages.items()},
            prompt_tokens=books.prompt_tokens,
            cached_tokens=books.cached_tokens,
            pins=[self._pin_line(pin) for pin in books.pins.values()],
            pin_pages_max=self._pins.pages_max,
            pins_given_way=self._pins.given_way_count,
            is_sweeping=self._sweeps.is_going_on,
            swept_pages=self._sweeps.freed_pages,
            disk=self._tiers.line(),
        )

    def tree(self, message: AskCacheTree) -> CacheTree:
        """One part of the listing of edges, as they are now. Raises ``Malformed`` for a part beyond
        the edges that a listing may look at."""
        first, end = message.first, min(message.first + message.limit, _EDGES_MAX)
        if first >= end:
            raise Malformed(
                f"a listing ends after {_EDGES_MAX} edges: ask for that of one root (--root)"
            )
        found = list(islice(self._edges(message.root), first, end + 1))
        lines = [
            self._line(tree, node, level, node.uses) for tree, node, level in found[: end - first]
        ]
        more = len(found) > len(lines)
        return CacheTree(host=self._books.facts.host, first=first, lines=lines, more=more)

    def top(self, message: AskCacheTop) -> CacheTop:
        """The most valuable of the edges looked at, by reuse or by the length of the prefix."""
        found = list(islice(self._edges(message.root), _EDGES_MAX + 1))
        complete = len(found) <= _EDGES_MAX
        through: dict[Node, int] = {}
        for _, node, _ in reversed(found):  # children before parents
            through[node] = count = through.get(node, 0) + node.uses
            through[node.parent] = through.get(node.parent, 0) + count
        if message.by == "reuse":
            used = (edge for edge in found if through[edge[1]])
            best = nlargest(
                message.limit, used, key=lambda edge: through[edge[1]] * len(edge[1].pages)
            )
        else:
            ends = (edge for edge in found if not edge[1].children)
            best = nlargest(message.limit, ends, key=lambda edge: edge[1].depth)
        lines = [self._line(tree, node, level, through[node]) for tree, node, level in best]
        return CacheTop(host=self._books.facts.host, lines=lines, complete=complete)

    def _edges(self, root_start: str) -> Iterator[tuple[Tree, Node, int]]:
        """Every edge with its tree and the number of edges above it, parents before children."""
        for tree in sorted(self._books.forest.trees.values(), key=lambda tree: tree.index):
            if not tree.digest.hex().startswith(root_start):
                continue
            stack = [iter(tree.root.children.values())]
            while stack:  # of iterators, so that only siblings looked at are visited
                node = next(stack[-1], None)
                if node is None:
                    stack.pop()
                    continue
                yield tree, node, len(stack) - 1
                stack.append(iter(node.children.values()))

    def _line(self, tree: Tree, node: Node, level: int, uses: int) -> CacheLine:
        books = self._books
        committed = books.pool.identity_of(last_of(node.pages))
        return CacheLine(
            root=tree.digest.hex(),
            level=level,
            depth_pages=node.depth,
            pages=len(node.pages),
            tokens=len(node.pages) * self._page_size,
            pins=node.pins,
            uses=uses,
            age_s=self._ages.age_s(committed, books.now_ms),
            model=tree.model,
            tenant=tree.tenant,
        )

    # Keeping

    def pin(self, message: PinPrefix) -> PrefixPinned:
        """Pin what is cached of a prefix. Raises ``Gone``, ``NoCapacity`` or ``Malformed``."""
        if len(message.tokens) < self._page_size:
            raise Malformed(
                f"only whole pages of {self._page_size} tokens are cached, and this prefix has "
                f"{len(message.tokens)}; give more of it"
            )
        tokens = np.asarray(message.tokens, "<u4").tobytes()
        ttl_ms = None if message.ttl_s is None else 1_000 * message.ttl_s
        root = bytes.fromhex(message.root)
        before = self._pins.named(root, tokens)
        was = None if before is None else self._pin_line(before)
        pin = self._pins.pin(root, tokens, ttl_ms)
        return PrefixPinned(
            host=self._books.facts.host,
            pin=pin.name,
            pages=pin.anchor.depth,
            tokens=pin.anchor.depth * self._page_size,
            asked_tokens=len(message.tokens),
            expires_in_s=self._pins.expires_in_s(pin),
            before=was,
        )

    def _pin_line(self, pin: Pin) -> PinLine:
        return PinLine(
            pin=pin.name,
            root=pin.tree.digest.hex(),
            pages=pin.anchor.depth,
            tokens=pin.anchor.depth * self._page_size,
            expires_in_s=self._pins.expires_in_s(pin),
        )

    def unpin(self, message: UnpinPrefix) -> PrefixUnpinned:
        """End one pin, or all. Raises ``Gone`` if there is no such pin."""
        books = self._books
        if message.pin is None:
            ended = list(books.pins.values())
        else:
            pin = books.pins.get(message.pin)
            if pin is None:
                raise Gone(
                    f"nothing is pinned as {message.pin} here: `pagemesh cache stats` lists pins"
                )
            ended = [pin]
        self._pins.unpin(ended)
        return PrefixUnpinned(host=books.facts.host, pins=[pin.name for pin in ended])

    # Dropping

    def invalidate(self, message: InvalidateCache) -> CacheInvalidated:
        """Retire roots, in memory and on disk, or free what is idle. Raises ``Malformed``, or
        ``Gone`` if there is no such root."""
        trees = self._books.forest.trees
        if message.what == "idle":
            if message.name:
                raise Malformed("idle is of every root, model and tenant: leave name out")
            self._tiers.retire(RetiredRoots(everything=True))
            for tree in trees.values():
                self._sweeps.add(tree, self._books.pool.last_sequence)
            return self._invalidated([], 0, Retired(0, ()))
        if not message.name:
            raise Malformed(f"the {message.what} has no name: give its name")
        chosen, unknown_count = self._chosen(message)
        known = self._names(message.what) if len(chosen) == unknown_count else []
        # Nobody knows whose pages are on a disk that is off: it has to forget all.
        everything = message.what != "root" and self._books.disk is None
        self._tiers.retire(RetiredRoots(frozenset(chosen), everything))
        retired = self._retiring.retire([trees[root] for root in chosen if root in trees])
        return self._invalidated(chosen, unknown_count, retired, known)

    def _chosen(self, message: InvalidateCache) -> tuple[list[bytes], int]:
        """The roots meant, and how many of them are included only because nobody knows whose they
        are, like those that are only on disk."""
        trees = self._books.forest.trees
        only_on_disk = sorted(self._tiers.roots() - trees.keys())
        if message.what == "root":
            roots = [*trees, *only_on_disk]
            found = [root for root in roots if root.hex().startswith(message.name)]
            if not found and self._books.disk is None and len(message.name) == _ROOT_DIGITS:
                with contextlib.suppress(ValueError):
                    root = bytes.fromhex(message.name)  # it may be on a disk that is off
                    found = [root] if root.hex() == message.name else []
            if not found:
                raise Gone(
                    f"no root starts with {message.name} here: `pagemesh cache tree` lists "
                    "those in memory"
                )
            if len(found) > 1:
                raise Malformed(f"{len(found)} roots start with {message.name}: give more digits")
            return found, 0
        label = message.what  # also the name of a tree's attribute
        found = [root for root, tree in trees.items() if getattr(tree, label) == message.name]
        unknown = [root for root, tree in trees.items() if not getattr(tree, label)]
        unknown += only_on_disk
        return found + unknown, len(unknown)

    def _names(self, what: str) -> list[str]:
        """The models or tenants with something cached, for a caller who may have mistyped one."""
        trees = self._books.forest.trees.values()
        return sorted({getattr(tree, what) for tree in trees} - {""})[:_NAMES_MAX]

    def _invalidated(
        self, roots: list[bytes], unknown_count: int, retired: Retired, known: Sequence[str] = ()
    ) -> CacheInvalidated:
        freed = self._sweeps.work()
        return CacheInvalidated(
            host=self._books.facts.host,
            root_count=len(roots),
            roots=[root.hex() for root in roots[:LINES_MAX]],
            unknown_root_count=unknown_count,
            freed_pages=freed,
            used_pages=retired.used_pages,
            pins=list(retired.pins),
            known=list(known),
            goes_on=self._sweeps.is_going_on,
        )
