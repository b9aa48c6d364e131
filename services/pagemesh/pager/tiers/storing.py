"""What goes from the pool to disk, and what cannot be found there any more when pages leave.

A page on disk is found through the pages before it, in the pool or on disk as well. Eviction takes
edges from their end, so the pages before an evicted one are still in the pool; when one of these
leaves and is not stored, everything that follows it on disk is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from pagemesh.pager.books import Books
from pagemesh.pager.pages.runs import own, part, table_of
from pagemesh.pager.tiers.chain_keys import EdgeChains, chain_keys, root_chain
from pagemesh.pager.tiers.damage import Damage
from pagemesh.pager.tiers.disk_shelves import Record
from pagemesh.pager.tiers.disk_tier import DiskTier
from pagemesh.pager.tiers.movers import Movers
from pagemesh.pager.tiers.tier_events import ForgetSlots, SkipSlots, StorePages
from pagemesh.pager.tree.leaving import Why
from pagemesh.pager.tree.lifetime import FOREVER_MS
from pagemesh.pager.tree.radix import Node, Tree

_LOOKED_PAGES_MAX = 8_192
"""Pages of the pool that the search for strays looks at in one turn."""


class Storing:
    """Of one pager life. ``unseen`` is called with roots of which pages are invalidated while the
    tier is off, or not open yet."""

    def __init__(
        self, books: Books, movers: Movers, damage: Damage, unseen: Callable[[bytes], None]
    ) -> None:
        self._books, self._movers, self._damage = books, movers, damage
        self._unseen = unseen
        self._width = books.facts.page_token_bytes
        self._away: deque[Node] | None = None
        self._away_pages = 0
        """How many pages of the first edge in ``_away`` are on disk or on their way."""
        self._away_left = 0
        self._away_quotas: dict[str, int] = {}
        """By tenant: how many pages may still be put away."""
        self._looking: Iterator[int] | None = None
        """The search for strays (``_look``); None once all are found."""
        self._strays: deque[Record] = deque()
        self.invalidated: set[bytes] = set()
        """Roots of which the disk was told to forget pages, since these were invalidated."""
        self._edges = EdgeChains(self._width)

    def leaving(self, node: Node, page_count: int, why: Why) -> None:
        """The last pages of an idle leaf leave the pool: store them if they were only evicted."""
        disk = self._books.disk
        if disk is None and why is not Why.INVALIDATED:
            return
        tree = self._books.forest.tree_of(node)
        if disk is None:
            if not tree.is_retired:
                self._unseen(tree.digest)
            return
        first = len(node.pages) - page_count
        if tree.is_retired:
            pass  # its records are gone; any of its root are a later tree's
        elif why is Why.EVICTED and _is_kept(node):
            if self._movers.can_copy(self._books.now_ms):
                self._store(disk, node, first, page_count)
            else:
                disk.counts.not_stored += self._lose(disk, tree, node, first, page_count)
        elif disk.page_count and why in (Why.EXPIRED, Why.INVALIDATED):
            self._drop(disk, node, tree.digest, first, page_count, why)
            self._lose(disk, tree, node, first, page_count, at_once=True)
        elif disk.page_count:
            self._lose(disk, tree, node, first, page_count)
        node.chain = None
        self._edges.shorten(node, first)

    def _drop(
        self, disk: DiskTier, node: Node, root: bytes, first: int, count: int, why: Why
    ) -> None:
        """Drop what is on disk of ``count`` pages of ``node``, from its page ``first`` on."""
        _, *chains = self._chains_of(disk, node, root, first, count)
        found = list(filter(None, [disk.find(root, one) for one in chains]))
        dropped = disk.drop_all(found, at_once=True)
        # A record whose slot was given away stays on disk until that is written over.
        if why is Why.INVALIDATED and (dropped or disk.staged):
            self.invalidated.add(root)
        disk.counts.left(why, len(dropped))
        forget(self._books, dropped)

    def _lose(
        self, disk: DiskTier, tree: Tree, node: Node, first: int, count: int,
        *, at_once: bool = False,
    ) -> int:  # fmt: skip
        """Pages leave the pool and are not stored. Returns how many are not on disk already."""
        root = tree.digest
        _, *chains = self._chains_of(disk, node, root, first, count)
        missing_count = sum(disk.find(root, chain) is None for chain in chains)
        forget(self._books, disk.lose(chains, root, at_once=at_once))
        return missing_count

    def put_away(self, *, anew: bool) -> None:
        """Store committed pages that are not on disk yet, as many as may wait to be written; starts
        of prefixes first, since nothing is found without them. ``anew``: begin again."""
        disk = self._books.disk
        if disk is None:
            return
        if anew or self._away is None:
            self._movers.try_again()
            self._away, self._away_pages = deque(self._by_depth()), 0
            self._away_left = disk.slot_count  # more would evict what was stored first
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
        """Store ``count`` pages of ``node`` from its page ``first`` on, as many as there is room
        for."""
        tree = self._books.forest.tree_of(node)
        root = tree.digest
        before, *chains = self._chains_of(disk, node, root, first, count)
        places, slots, dropped = disk.claim(chains, before, root, tree.terms)
        forget(self._books, dropped)  # before their slots are used again
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

    def find_strays(self, disk: DiskTier) -> None:
        """Begin to look for strays: pages stored by earlier pagers that cannot be found, because
        their predecessor was never written, and is not in the pool either. ``drop_strays`` goes on,
        in parts."""
        self._looking = self._look(disk)

    def _look(self, disk: DiskTier) -> Iterator[int]:
        """Find strays, going through the edges of the pool, and yield the pages of each. Pages that
        leave the pool meanwhile drop what follows them by themselves."""
        for root, strays in disk.strays().items():
            cached: set[int] = set()
            for chains in self._chains_in(disk, root):
                cached.update(chains)
                yield len(chains)
            self._strays.extend(one for one in strays if one.before not in cached)

    @property
    def has_strays(self) -> bool:
        """Whether strays are still to be found or dropped, or what followed pages that are gone."""
        disk = self._books.disk
        is_severed = disk is not None and bool(disk.severed)
        return is_severed or self._looking is not None or bool(self._strays)

    def drop_strays(self, disk: DiskTier, count_max: int) -> None:
        """Find some strays, and drop some with what follows them: after the loss of the pool that
        may be everything on disk. Those whose predecessor is on disk by now stay."""
        looked = 0
        while self._looking is not None and looked < _LOOKED_PAGES_MAX:
            count = next(self._looking, 0)
            looked += count
            if not count:
                self._looking = None
        dropped = disk.drop_all(())
        while self._strays and len(dropped) < count_max:
            stray = self._strays.popleft()
            if stray.before not in stray.shelf.records:
                dropped += disk.drop_all([stray])
        disk.counts.cut_off += len(dropped)
        forget(self._books, dropped)

    def check(self) -> None:
        """Raise ``AssertionError`` unless each page on disk can be found: what comes before it is
        there, or in the pool."""
        disk = self._books.disk
        if disk is None:
            return
        for root, strays in disk.strays().items():
            cached = {one for chains in self._chains_in(disk, root) for one in chains}
            lost = [one for one in strays if one.before not in cached]
            assert self.has_strays or not lost, "what it follows is nowhere"

    # Chain keys

    def _chains_of(
        self, disk: DiskTier, node: Node, root: bytes, first: int, count: int
    ) -> list[int]:
        """Chain keys of the page before page ``first`` of ``node``, and of ``count`` pages from
        that on."""
        chains = self._edges.of(node, root_chain(disk.chain_key, root))
        return chains[first : first + count + 1]

    def _chains_in(self, disk: DiskTier, root: bytes) -> Iterator[list[int]]:
        """Chain keys, by edge, of all pages that are in the pool at the first step."""
        tree = self._books.forest.trees.get(root)
        if tree is None:
            return
        ends = {tree.root: root_chain(disk.chain_key, root)}
        edges = [(node, node.parent, node.tokens) for node in tree.root.below()]
        for node, above, tokens in edges:
            chains = list(chain_keys(ends[above], tokens, 0, len(tokens), self._width))
            ends[node] = chains[-1]
            yield chains


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
    """Whether its pages may be stored: not with a time to live, since records have none."""
    return node.expires_ms >= FOREVER_MS
