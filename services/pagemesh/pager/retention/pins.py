"""Pins: prefixes that operators keep. Pinned pages count as in use, so no policy can evict them.

A pin is anchored in the tree like a lease. It ends when its lifetime is over, when it is unpinned,
with its root, or when it gives way: a sequence that lacks room although no older one holds any goes
first (``Pins.give_way``), so a request never waits for a pin. The same holds for the pages that a
tenant may use.

Pins outlive the pager: each change is stored beside the pool before it is answered. A stored pin
contains no tokens; it names its last page by the page's identity, which no other page ever has. So
a pin whose pages are not all recovered under the same root ends with the pager that knew it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from pagemesh.pager.books import Books
from pagemesh.pager.events import KeptPin, StorePins
from pagemesh.pager.leases.lease import Lease
from pagemesh.pager.leases.states import LeaseState
from pagemesh.pager.pages.runs import last_of, where
from pagemesh.pager.regrow import Edge
from pagemesh.pager.tree.accounts import Account
from pagemesh.pager.tree.radix import Match, Node, Tree
from pagemesh.wire.errors import Gone, NoCapacity
from pagemesh.wire.messages import Order


@dataclass(slots=True, eq=False)
class Pin:
    """``anchor``: where its pages end. ``expires_ms``: None for never."""

    name: str
    tree: Tree
    anchor: Node
    expires_ms: int | None


class Pins:
    """Makes and ends pins. ``books.pins`` has them by name, the oldest first."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.given_way_count = 0

    @property
    def pages_max(self) -> int:
        """How many pages may be pinned in all."""
        return int(self._books.facts.page_count * self._books.limits.pin_share_max)

    def named(self, root: bytes, tokens: bytes) -> Pin | None:
        """The pin of the whole pages of ``tokens``, if there is one."""
        return self._books.pins.get(name_of(root, tokens, self._books.facts.page_token_bytes))

    def pin(self, root: bytes, tokens: bytes, ttl_ms: int | None) -> Pin:
        """Pin the cached prefix of ``tokens`` for ``ttl_ms``, or without limit if None. Raises
        ``Gone`` when no page of it is cached, ``NoCapacity`` when it would exceed the limits of
        pins or the quota of its tenant."""
        books = self._books
        name = name_of(root, tokens, books.facts.page_token_bytes)
        old = self.named(root, tokens)
        tree = books.forest.trees.get(root)
        pages_max = len(tokens) // books.facts.page_token_bytes
        match = books.forest.match(tree.root, tokens, pages_max) if tree is not None else None
        if tree is None or match is None or not match.pages:
            raise Gone(
                "no whole page of this prefix is cached here; send a prompt that begins with it "
                "first, with the same API key and cache_salt (for the beginning of chats, use "
                "`--messages`)"
            )
        self._require_room(name, match)
        self._require_quota(tree, match)
        anchor = books.forest.pin_match(match)
        if old is not None:
            self._end(old)
        pin = self._enter(name, tree, anchor, ttl_ms)
        self._keep()
        return pin

    def _require_room(self, name: str, match: Match) -> None:
        """Raises ``NoCapacity`` when ``match``, pinned as ``name``, would exceed the limits."""
        books = self._books
        kept = self._nodes(without=name)
        pages = sum(len(node.pages) for node in kept)
        node = match.node
        pages += 0 if match.edge in kept else match.edge_pages
        while not node.is_root:
            pages += 0 if node in kept else len(node.pages)
            node = node.parent
        if pages > self.pages_max:
            raise NoCapacity(
                f"{pages} pages would be pinned in total, and at most {self.pages_max} may be; "
                "unpin others, or raise PAGEMESH_PIN_SHARE_MAX"
            )
        if name not in books.pins and len(books.pins) >= books.limits.pin_count_max:
            raise NoCapacity(
                f"{len(books.pins)} prefixes are pinned, which is the limit; unpin one first"
            )

    def _require_quota(self, tree: Tree, match: Match) -> None:
        """Raises ``NoCapacity`` when pinning ``match`` would make the tenant of ``tree`` exceed its
        quota: its sequences would wait, and the youngest be preempted, because of a pin."""
        account, more = tree.root.account, self._books.forest.idle_pages(match)
        if account.tenant and more and account.used_pages + more > account.quota_pages:
            raise NoCapacity(
                f"{more} pages more would be in use of the {account.quota_pages} that "
                f"{account.tenant} may use, and {account.used_pages} already are; pin it when "
                "fewer of its sequences run, or ask for a larger quota"
            )

    def _enter(self, name: str, tree: Tree, anchor: Node, ttl_ms: int | None) -> Pin:
        expires_ms = None if ttl_ms is None else self._books.now_ms + ttl_ms
        pin = self._books.pins[name] = Pin(name, tree, anchor, expires_ms)
        tree.pin_count += 1
        return pin

    def unpin(self, pins: Iterable[Pin]) -> None:
        """End ``pins``."""
        ended = list(pins)
        for pin in ended:
            self._end(pin)
        if ended:
            self._keep()

    def _end(self, pin: Pin) -> None:
        books = self._books
        del books.pins[pin.name]
        books.forest.unpin(pin.anchor)
        pin.tree.pin_count -= 1
        books.freed = True

    def expire(self) -> None:
        """End the pins whose lifetime is over."""
        now_ms, pins = self._books.now_ms, self._books.pins.values()
        self.unpin([one for one in pins if one.expires_ms is not None and one.expires_ms <= now_ms])

    def give_way(self, order: Order, own: Lease | None, *, within: Account | None = None) -> bool:
        """End the oldest pin if nothing else can make room for the waiter at ``order`` (``own``:
        its lease, if it has one): younger leases hold too little (``Preemption.press`` has left
        them alone), no older lease exists, and no pages are on their way. ``within``: the tenant
        whose quota is short. Returns whether a pin ended."""
        books = self._books
        if not books.pins or not books.may_evict():
            return False
        if within is None and (books.loads or books.pool.draining):
            return False
        for lease in books.leases.values():
            if lease is own or (within is not None and lease.account is not within):
                continue
            if lease.order.place < order.place or lease.life.state is LeaseState.REVOKED:
                return False
        for pin in books.pins.values():
            if within is None or pin.tree.root.account is within:
                self.unpin([pin])
                self.given_way_count += 1
                return True
        return False

    def expires_in_s(self, pin: Pin) -> int | None:
        """Seconds that ``pin`` has left, rounded up. 0: it ends with the next tick; None: never."""
        if pin.expires_ms is None:
            return None
        return max(0, -((self._books.now_ms - pin.expires_ms) // 1_000))

    # Over a restart

    def restore(self, kept: Iterable[KeptPin], edges: list[Edge]) -> None:
        """Restore the pins of an earlier pager life whose pages were all recovered and that the
        limits still allow. ``edges``: the recovered edges."""
        books = self._books
        wanted = list(kept)
        ends = _ends(books, wanted, edges)
        for one in wanted:
            tree, tokens = ends.get(one.identity, (None, b""))
            if tree is None or tree.digest != one.root:
                continue
            match = books.forest.match(tree.root, tokens, one.pages, is_over_too=True)
            if match.pages != one.pages or len(tokens) != one.pages * books.facts.page_token_bytes:
                continue
            try:
                self._require_room(one.name, match)
            except NoCapacity:  # less may be pinned than before
                continue
            self._enter(one.name, tree, books.forest.pin_match(match), one.expires_in_ms)
        if len(books.pins) < len(wanted):
            self._keep()

    def _keep(self) -> None:
        books = self._books
        pool, now_ms = books.pool, books.now_ms
        books.out.append(
            StorePins(
                tuple(
                    KeptPin(
                        pin.name, pin.tree.digest, pool.identity_of(last_of(pin.anchor.pages)),
                        pin.anchor.depth,
                        None if pin.expires_ms is None else max(0, pin.expires_ms - now_ms),
                    )
                    for pin in books.pins.values()
                )
            )
        )  # fmt: skip

    def _nodes(self, without: str) -> set[Node]:
        """Every edge that a pin keeps, except those that only the pin named ``without`` keeps."""
        kept: set[Node] = set()
        for pin in self._books.pins.values():
            node = pin.anchor
            while pin.name != without and not node.is_root and node not in kept:
                kept.add(node)
                node = node.parent
        return kept


def name_of(root: bytes, tokens: bytes, page_bytes: int) -> str:
    """The name of a pin: 16 hexadecimal digits, a hash of ``root`` and the whole pages of
    ``tokens``, the same on every host."""
    whole = len(tokens) // page_bytes * page_bytes
    hashed = xxhash.xxh3_64(root)
    hashed.update(tokens[:whole])
    return hashed.hexdigest()


def _ends(books: Books, wanted: list[KeptPin], edges: list[Edge]) -> dict[int, tuple[Tree, bytes]]:
    """Maps each wanted identity that a page of ``edges`` has to the page's tree, and to all tokens
    up to the end of that page."""
    found: dict[int, tuple[Tree, bytes]] = {}
    if not wanted:
        return found
    identities, width = books.pool.identities, books.facts.page_token_bytes
    is_wanted = np.isin(identities, np.array([one.identity for one in wanted], np.uint64))
    for edge in edges:
        pages = where(edge.node.pages)
        for at in np.flatnonzero(is_wanted[pages]).tolist():
            parts, node = [edge.node.tokens[: (at + 1) * width]], edge.node.parent
            while not node.is_root:
                parts.append(node.tokens)
                node = node.parent
            page = int(edge.node.pages[at])
            found[books.pool.identity_of(page)] = (edge.tree, b"".join(reversed(parts)))
    return found
