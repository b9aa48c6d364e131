"""What goes from the pool to disk, and what there cannot be found any more without it.

A page on disk is found by way of those before it, in the pool or on disk as well. What is evicted
leaves from its end, so that its predecessors are in the pool still; when one of these then leaves
and is not stored, all that follows it on disk is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pagemesh.pager.books import Books
from pagemesh.pager.pages.runs import own, part, table_of
from pagemesh.pager.tiers.chain_keys import chain_at, chain_keys, chain_over, root_chain
from pagemesh.pager.tiers.damage import Damage
from pagemesh.pager.tiers.disk_shelves import Record
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.movers import Movers
from pagemesh.pager.tiers.tier_events import ForgetSlots, SkipSlots, StorePages
from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.pager.tree.radix import Node, Tree


class Storing:
    """Of one pager life."""

    def __init__(self, books: Books, movers: Movers, damage: Damage) -> None:
        self._books, self._movers, self._damage = books, movers, damage
        self._width = books.facts.page_token_bytes
        self._away: deque[Node] | None = None
        self._away_pages = 0
        """Of the first of ``_away``, those that are on disk or on their way."""
        self._away_left = 0
        self._away_quotas: dict[str, int] = {}
        """What tenants may still put there."""

    def leaving(self, node: Node, page_count: int, why: Why) -> None:
        """The last pages of an idle leaf leave the pool: keep them if they were only evicted."""
        disk = self._books.disk
        if disk is None:
            return
        tree = self._books.forest.tree_of(node)
        first = len(node.pages) - page_count
        if tree.is_retired:
            pass  # its records are gone; those of its root are of a later tree
        elif why is Why.EVICTED and _is_kept(node):
            if self._movers.can_copy(self._books.now_ms):
                self._store(disk, node, first, page_count)
            else:
                disk.counts.not_stored += page_count
                self._lose(disk, tree, node, first, page_count)
        elif disk.page_count and why in (Why.EXPIRED, Why.INVALIDATED):
            chains = self._chains_of(node, tree.digest, first, page_count)
            known = list(filter(None, (disk.find(tree.digest, one) for one in chains)))
            dropped = disk.drop_all(known)
            disk.counts.left(why, len(dropped))
            forget(self._books, dropped)
            self._lose(disk, tree, node, first, page_count)
        elif disk.page_count:
            self._lose(disk, tree, node, first, page_count)
        node.chain = None

    def _lose(self, disk: DiskTier, tree: Tree, node: Node, first: int, count: int) -> None:
        """Pages leave and are not stored."""
        chains = self._chains_of(node, tree.digest, first, count)
        forget(self._books, disk.lose(chains, tree.digest))

    def put_away(self, *, anew: bool) -> None:
        """Store what is committed and not on disk yet, as much as may wait to be written; the
        starts of prefixes first, since nothing is found without them."""
        disk = self._books.disk
        if disk is None:
            return
        if anew or self._away is None:
            self._movers.try_again()
            self._away, self._away_pages = deque(self._by_depth()), 0
            self._away_left = disk.slot_count  # more would drive out what was stored first
            self._away_quotas = {}
        while self._away and self._away_left and (room := disk.staged_room):
            node, first = self._away[0], self._away_pages
            if first >= len(node.pages) or (tree := self._books.forest.tree_of(node)).is_retired:
                self._away.popleft()  # it has left since they were listed, or was invalidated
                self._away_pages = 0
                continue
            terms = tree.terms
            quota = self._away_quotas.get(terms.tenant, terms.disk_quota_pages(disk.slot_count))
            count = min(len(node.pages) - first, room, self._away_left, quota)
            if count:
                self._store(disk, node, first, count)
            self._away_left -= count
            self._away_quotas[terms.tenant] = quota - count
            self._away_pages += count
            if self._away_pages == len(node.pages) or quota == count:
                self._away.popleft()
                self._away_pages = 0

    def _by_depth(self) -> list[Node]:
        trees = self._books.forest.trees.values()
        nodes = [node for tree in trees for node in tree.root.below() if _is_kept(node)]
        return sorted(nodes, key=lambda node: node.depth - len(node.pages))

    def _store(self, disk: DiskTier, node: Node, first: int, count: int) -> None:
        """Keep ``count`` pages of ``node`` from its page ``first`` on, as many as there is room
        for."""
        tree = self._books.forest.tree_of(node)
        root = tree.digest
        before = self._chain_before(node, root, first)
        chains = self._chains_of(node, root, first, count)
        places, slots, dropped = disk.claim(chains, before, root, tree.terms)
        forget(self._books, dropped)  # before its slots are used again
        self._damage.mended(root, chains)
        if not places:
            return
        pages = part(node.pages, first, first + count)
        if len(places) < count:
            pages = table_of(pages)[places]
        index = node.depth - len(node.pages) + first
        self._books.out.append(
            StorePages(
                own(pages), tuple(slots), tuple([index + place for place in places]),
                tuple([chains[place] for place in places]), root, node.path(),
            )
        )  # fmt: skip

    def drop_strays(self, disk: DiskTier) -> None:
        """Forget what earlier pagers have stored and nobody finds, as what it follows was never
        written, and is not in the pool either."""
        for root, strays in disk.strays().items():
            cached = self._chains_in(root)
            dropped = disk.drop_all(one for one in strays if one.before not in cached)
            disk.counts.cut_off += len(dropped)
            forget(self._books, dropped)

    def check(self) -> None:
        """Raise ``AssertionError`` unless each page on disk can be found: what comes before it is
        there, or in the pool."""
        disk = self._books.disk
        for root, strays in (disk.strays() if disk is not None else {}).items():
            cached = self._chains_in(root)
            assert all(one.before in cached for one in strays), "what it follows is nowhere"

    # Chain keys

    def _chain_before(self, node: Node, root: bytes, first: int) -> int:
        """That of the page before page ``first`` of ``node``."""
        start = chain_at(node.parent, root, self._width)
        return chain_over(start, node.tokens, 0, first * self._width, self._width)

    def _chains_of(self, node: Node, root: bytes, first: int, count: int) -> list[int]:
        """Those of ``count`` pages of ``node`` from its page ``first`` on."""
        width = self._width
        start = self._chain_before(node, root, first)
        return list(chain_keys(start, node.tokens, first * width, (first + count) * width, width))

    def _chains_in(self, root: bytes) -> set[int]:
        """Those of all pages in the pool."""
        tree = self._books.forest.trees.get(root)
        if tree is None:
            return set()
        found: set[int] = set()
        ends = {tree.root: root_chain(root)}
        for node in tree.root.below():
            start, end = ends[node.parent], len(node.tokens)
            chains = list(chain_keys(start, node.tokens, 0, end, self._width))
            found.update(chains)
            ends[node] = chains[-1]
        return found


def forget(books: Books, records: Iterable[Record]) -> None:
    """Have the disk forget ``records``, also those that are being written."""
    written: list[int] = []
    unwritten: list[int] = []
    for record in records:
        (written if record.is_written else unwritten).append(record.slot)
    if written:
        books.out.append(ForgetSlots(tuple(written)))
    if unwritten:
        books.out.append(SkipSlots(tuple(unwritten)))


def _is_kept(node: Node) -> bool:
    """Whether its pages may be stored: a record has no time to live."""
    return node.expires_ms >= FOREVER_MS
