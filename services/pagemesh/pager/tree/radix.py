"""The prefix tree: which committed page holds the K and V of which tokens.

There is one radix tree per root digest. An edge (a ``Node``) owns a run of pages and the token ids
in them, as packed bytes. It starts and ends on page boundaries, and the children of a node are
keyed by the bytes of their first page:

    root --[pages 7 8 9 | 48 tokens]--> node --[pages 30 31]--> leaf
                                         `-----[page 12]------> leaf

An edge is compared with one ``startswith``; where it differs is found by bisection. So a match
runs at memory speed in the length of the prompt, and costs a few operations per edge and nothing
per cached page.

``pins`` counts the leases anchored at a node plus its pinned children, so pinning a path stops at
the first node that is pinned already. A node without pins is *idle*, and so is all below it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pagemesh.pager.pages.pool import Grant, PagePool
from pagemesh.pager.pages.runs import NO_PAGES, Pages, as_run, join, join_all, last, own, part
from pagemesh.pager.tree.accounts import Accounts
from pagemesh.pager.tree.leaving import Leaver, Why
from pagemesh.pager.tree.lifetime import FOREVER_MS, Lifetimes
from pagemesh.pager.tree.near import common_tokens, nearest
from pagemesh.pager.tree.node import UNRANKED
from pagemesh.pager.tree.node import Node as Node
from pagemesh.pager.tree.tree import Tree as Tree
from pagemesh.wire.tokens import U32

EDGE_PAGES_MAX: Final = 4_096
"""An edge is copied when it grows; beyond this length a new edge starts."""


class Match:
    """A cached prefix: all of ``node``, then ``edge_pages`` (possibly 0) pages of ``edge``;
    ``pages`` in all."""

    __slots__ = ("edge", "edge_pages", "node", "pages")

    def __init__(self, node: Node, edge: Node, edge_pages: int, pages: int) -> None:
        self.node: Final = node
        self.edge: Final = edge
        self.edge_pages: Final = edge_pages
        self.pages: Final = pages

    @property
    def last_page(self) -> Pages:
        """Its last page, or an empty list."""
        if self.edge_pages:
            return part(self.edge.pages, self.edge_pages - 1, self.edge_pages)
        return last(self.node.pages)


class Inserted:
    """The inserted tokens end at ``node``, which is pinned. Their first ``known_pages`` pages were
    in the tree already; the others were added after page ``after`` (empty: at the root), with
    identities from ``first_identity`` on."""

    __slots__ = ("after", "first_identity", "known_pages", "node")

    def __init__(self, node: Node, known_pages: int, after: Pages, first_identity: int) -> None:
        self.node: Final = node
        self.known_pages: Final = known_pages
        self.after: Final = after
        self.first_identity: Final = first_identity


class Forest:
    """Every tree of a pager, sharing one ledger."""

    def __init__(self, pool: PagePool, page_size: int, accounts: Accounts) -> None:
        self._pool = pool
        self.accounts = accounts
        self.lifetimes = Lifetimes()
        self.now_ms = 0  # edges that have expired by then are not matched
        self._width = 4 * page_size
        self.trees: dict[bytes, Tree] = {}
        self.left_pages = dict.fromkeys(Why, 0)
        """Pages that left the trees so far."""
        self.retired: dict[int, Tree] = {}
        """By index: trees that nothing new may match, and whose last leases have not ended."""
        self._leavers: list[Leaver] = []
        self._planted: dict[Node, Tree] = {}  # by root node

    def on_leave(self, leaver: Leaver) -> None:
        """Register ``leaver``, to be told of all pages that leave from now on."""
        self._leavers.append(leaver)

    def plant(self, digest: bytes, index: int) -> Tree:
        """Start an empty tree."""
        tree = self.trees[digest] = Tree(index, digest, Node(None, b"", NO_PAGES))
        self._planted[tree.root] = tree
        self.accounts.planted(tree, self.accounts.common)
        return tree

    def tree_of(self, node: Node) -> Tree:
        """The tree that ``node`` is in."""
        while (above := node.parent) is not node:
            node = above
        return self._planted[node]

    def retire(self, tree: Tree) -> None:
        """Let nothing new match ``tree``, which stays until it is felled."""
        del self.trees[tree.digest]
        self.retired[tree.index] = tree
        tree.is_retired = True

    def fell(self, tree: Tree) -> None:
        """Forget an unused tree."""
        assert tree.is_unused
        if tree.is_retired:
            del self.retired[tree.index]
        else:
            del self.trees[tree.digest]
        del self._planted[tree.root]
        self.accounts.felled(tree, tree.root.account)

    # Looking up

    def match(
        self, start: Node, tokens: bytes, pages_max: int, *, is_over_too: bool = False
    ) -> Match:
        """The longest cached prefix of ``tokens`` below ``start``, at most ``pages_max`` pages.
        ``is_over_too``: expired edges match as well."""
        width, now_ms = self._width, 0 if is_over_too else self.now_ms
        node, at, end = start, 0, pages_max * width
        while at < end:
            edge = node.children.get(tokens[at : at + width])
            if edge is None or (edge.expires_ms <= now_ms and not edge.pins):
                break
            size = len(edge.tokens)
            if at + size <= end and tokens.startswith(edge.tokens, at):
                node, at = edge, at + size
                continue
            pages = self.common_pages(edge.tokens, tokens, at, min(size, end - at))
            return Match(node, edge, pages, node.depth + pages)
        return Match(node, node, 0, node.depth)

    def near_tokens(self, match: Match, tokens: bytes) -> int:
        """How many tokens right after ``match``, the longest from the root, are in a cached page
        that differs further on or may not be used."""
        width = self._width
        at = match.pages * width
        rest = tokens[at : at + width]
        if match.edge_pages:
            cut = match.edge_pages * width
            return common_tokens(match.edge.tokens[cut : cut + width], rest)
        if not rest:
            return 0
        children = match.node.children
        if rest in children:
            return len(rest) // 4
        return nearest(children, rest)

    def idle_pages(self, match: Match) -> int:
        """Pages of the match that nothing pins yet: once it is pinned they cannot be evicted."""
        count = match.edge_pages if match.edge_pages and not match.edge.pins else 0
        node = match.node
        while not node.pins and (above := node.parent) is not node:
            count += len(node.pages)
            node = above
        return count

    def runs(self, node: Node) -> list[Pages]:
        """The pages from the root to the end of ``node``, edge by edge."""
        runs = []
        while (parent := node.parent) is not node:
            runs.append(node.pages)
            node = parent
        runs.reverse()
        return runs

    def table(self, node: Node) -> U32:
        """The pages from the root to the end of ``node``."""
        return join_all(self.runs(node))

    @staticmethod
    def try_unpin(anchor: Node, taken: dict[Node, int]) -> int:
        """How many more pages would be idle if ``anchor`` were unpinned too. ``taken`` counts the
        pins removed so far in this trial, and is updated."""
        count, node = 0, anchor
        while True:
            taken[node] = gone = taken.get(node, 0) + 1
            if gone < node.pins or node.is_root:
                return count
            count += len(node.pages)
            node = node.parent

    # Pinning

    def pin(self, node: Node) -> None:
        """One more lease is anchored at ``node``."""
        while True:
            node.pins += 1
            if node.pins > 1 or (parent := node.parent) is node:
                return
            self._pool.pin(len(node.pages))
            node.account.pin(node)
            node = parent

    def unpin(self, node: Node) -> None:
        """One lease less is anchored at ``node``."""
        while True:
            assert node.pins > 0, "unpinned more often than pinned"
            node.pins -= 1
            if node.pins or (parent := node.parent) is node:
                return
            self._pool.unpin(len(node.pages))
            node.account.unpin(node)
            if node.expires_ms < FOREVER_MS:  # it may have expired while it was in use
                self.lifetimes.again(node, self.now_ms)
            node = parent

    def pin_match(self, match: Match) -> Node:
        """Pin a match, cutting its last edge where the match ends. Returns the anchor."""
        if match.edge_pages:
            return self._cut_and_pin(match.edge, match.edge_pages)
        self.pin(match.node)
        return match.node

    def used(self, node: Node, until_ms: int, rank: int) -> None:
        """A lease that ended had used ``node``, and so all above it: keep it ``until_ms`` and give
        it ``rank``, unless other leases gave it a later end or a higher rank."""
        if node.expires_ms < until_ms:
            self.lifetimes.keep(node, until_ms)
        while node.rank < rank and not node.is_root:
            node.rank = rank
            node = node.parent

    # Growing and shrinking

    def insert(
        self, anchor: Node, tokens: bytes, pages: Pages, *, grow: bool, timed: bool = False
    ) -> Inserted:
        """Commit ``pages``, held so far and holding ``tokens``, below ``anchor``.

        Content that is in the tree already stays as it is, and those of ``pages`` stay held. The
        node where the tokens end is pinned; the caller unpins ``anchor``. With ``grow``, ``anchor``
        itself may be lengthened if no other lease can notice. New pages are kept for ever or, if
        ``timed``, as long as they are in use and then as ``lifetimes`` says.
        """
        match = self.match(anchor, tokens, len(pages), is_over_too=True)
        known, after = match.pages - anchor.depth, match.last_page
        if known:
            pages, tokens = part(pages, known, len(pages)), tokens[known * self._width :]
        fresh, fresh_count = own(pages), len(pages)
        first = self._pool.commit(fresh) if fresh_count else 0
        anchor.account.used_pages += fresh_count
        grow = grow and not (timed and anchor.expires_ms)  # else others keep the anchor for longer
        if grow and not known and self._may_grow(anchor, fresh_count):
            anchor.tokens += tokens
            anchor.pages = join(anchor.pages, fresh)
            anchor.depth += fresh_count
            self.pin(anchor)
            return Inserted(anchor, known, after, first)
        node = self.pin_match(match)
        if not fresh_count:
            return Inserted(node, known, after, first)
        leaf = self._attach(node, tokens, fresh)
        leaf.rank = UNRANKED
        if timed:
            leaf.expires_ms = 0
        elif node.expires_ms < FOREVER_MS:
            self.lifetimes.keep(node, FOREVER_MS)
        leaf.pins = 1  # the caller's pin; the one on ``node`` now stands for this pinned child
        return Inserted(leaf, known, after, first)

    def graft(self, parent: Node, tokens: bytes, pages: Pages) -> Node | None:
        """Add an idle edge from an earlier pager life below ``parent``; None when there is one with
        the same first page. The ledger must count its pages as idle already."""
        if tokens[: self._width] in parent.children:
            return None
        return self._attach(parent, tokens, pages)

    def rest(self, nodes: Iterable[Node]) -> None:
        """After grafting: tell the policy every idle node, each after those below it."""
        for node in nodes:
            node.account.idle_pages += len(node.pages)
            node.account.policy.add(node)

    def reuse(
        self, count: int, spare_pages_max: int, why: Why = Why.EVICTED
    ) -> tuple[list[Grant], list[Pages]]:
        """Evict ``count`` idle pages (there must be that many), leaves first and each leaf from its
        end, and hold them anew. Up to ``spare_pages_max`` more are evicted and freed: an edge that
        goes as a whole leaves one run, and cutting a long edge page by page would copy it each
        time. Returns the grants, one for each cut, and the freed pages."""
        grants, spare = [], []
        account, others = self.accounts.richest()
        while count:
            node, pages_max = account.policy.victim()
            size = len(node.pages)
            run = part(node.pages, size - min(size, pages_max, count + spare_pages_max), size)
            self._cut_off(node, len(run), Why.QUOTA if account.is_over else why)
            beyond = max(0, len(run) - count)
            if beyond:
                self._pool.evict(part(run, 0, beyond))
                spare.append(part(run, 0, beyond))
                run = part(run, beyond, len(run))
            taken = as_run(run)
            grants.append((taken, self._pool.reuse(taken)))
            count -= len(taken)
            if count and not self.accounts.is_richest(account, others):
                account, others = self.accounts.richest()  # the others' pages have not changed
        return grants, spare

    def over_pages(self, match: Match, tokens: bytes, pages_max: int) -> int:
        """Pages of ``tokens`` after ``match`` that are still in the tree but have expired."""
        if match.edge_pages or not self.lifetimes.due:
            return 0
        rest, wanted = tokens[match.pages * self._width :], pages_max - match.pages
        return self.match(match.node, rest, wanted, is_over_too=True).pages - match.pages

    def trim(self, node: Node, count: int, why: Why) -> None:
        """Uncache and free the last ``count`` pages of an idle leaf."""
        pages = part(node.pages, len(node.pages) - count, len(node.pages))
        self._cut_off(node, count, why)
        self._pool.evict(pages)

    def strand(self, node: Node, why: Why) -> Pages:
        """Take an idle leaf out of its tree. Returns its pages, which drain: nobody may take them
        yet."""
        pages = node.pages
        self._cut_off(node, len(pages), why)
        self._pool.strand(pages)
        return pages

    def _cut_off(self, node: Node, count: int, why: Why) -> None:
        assert not node.children and not node.pins and not node.is_root
        self.left_pages[why] += count
        for leaver in self._leavers:
            leaver(node, count, why)
        keep = len(node.pages) - count
        if not keep:
            node.parent.lose_child(node.tokens[: self._width])
            node.parent.uses += node.uses  # those admissions used the parent as well
            self.lifetimes.forget(node)
        node.account.part(node, keep)
        if keep:
            node.tokens = node.tokens[: keep * self._width]
            node.pages = own(part(node.pages, 0, keep))
            node.depth -= count
            self.lifetimes.shortened(node)
        else:
            node.tokens, node.pages = b"", NO_PAGES

    def _attach(self, parent: Node, tokens: bytes, pages: Pages) -> Node:
        node = Node(parent, tokens, pages)
        parent.put_child(tokens[: self._width], node)
        return node

    def _cut_and_pin(self, lower: Node, keep: int) -> Node:
        """Cut an edge after ``keep`` pages; the upper part is a new node and gets one more pin.

        Leases anchored at ``lower`` stay there, so each path keeps its length.
        """
        lower.account.policy.tidy()  # notifications that it put off are about the uncut edge
        parent, cut = lower.parent, keep * self._width
        upper = Node(parent, lower.tokens[:cut], own(part(lower.pages, 0, keep)))
        parent.put_child(lower.tokens[: self._width], upper)
        lower.parent = upper
        lower.tokens = lower.tokens[cut:]
        lower.pages = own(part(lower.pages, keep, len(lower.pages)))
        upper.put_child(lower.tokens[: self._width], lower)
        upper.rank = lower.rank
        upper.account.policy.cut(upper, lower)
        self.lifetimes.cut(upper, lower)
        if lower.pins:
            upper.pins = 2  # the child, and the caller
        else:
            upper.pins = 1
            self._pool.pin(keep)
            upper.account.idle_pages -= keep
            upper.account.used_pages += keep
            self.pin(parent)
        return upper

    def _may_grow(self, node: Node, page_count: int) -> bool:
        # With one pin and no child, only the lease anchored here depends on its depth.
        alone = node.pins == 1 and not node.children and not node.is_root
        return alone and 0 < page_count <= EDGE_PAGES_MAX - len(node.pages)

    def common_pages(self, edge: bytes, tokens: bytes, at: int, size: int) -> int:
        """How many leading pages ``edge`` and ``tokens[at:at + size]`` share; the first is known
        to be equal."""
        width = self._width
        low, high = 1, size // width
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(edge[low * width : middle * width], at + low * width):
                low = middle
            else:
                high = middle - 1
        return low
