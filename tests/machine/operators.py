"""Operators of the machines' pager: they inspect, pin, unpin and invalidate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from tests.machine.mesh import Mesh
from tests.machine.prompts import ROOTS, USUAL, picks
from tests.unit.pager.rig import PAGE_SIZE, Rig

from pagemesh.pager.events import Sweep
from pagemesh.pager.pages.runs import table_of
from pagemesh.pager.tree.node import Node
from pagemesh.wire.cache_messages import (
    AskCacheStats,
    AskCacheTop,
    AskCacheTree,
    CacheInvalidated,
    CacheStats,
    CacheTop,
    CacheTree,
    InvalidateCache,
    PinPrefix,
    PrefixPinned,
    PrefixUnpinned,
    UnpinPrefix,
)
from pagemesh.wire.messages import Message, Refused
from pagemesh.wire.pager_reports import InspectPager

LABELS = (("model", "one"), ("model", "two"), ("tenant", "b"), ("tenant", "nobody"))


class Operators(Mesh):
    """Rules of operators, who use the pager's other door."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.taken_by_pins: set[int] = set()
        """Pages that were idle when a pin took them, since all promises could last be kept."""
        self.tenants = {root: {terms.tenant} for root, terms in zip(ROOTS, USUAL, strict=True)}
        """The tenants that each root has had so far."""

    def somebody_looks(self) -> None:
        """The figures shown add up, and looking changes nothing."""
        before = self.rig.core.report()
        stats = self.rig.ask(AskCacheStats())
        assert isinstance(stats, CacheStats)
        parts = stats.free_pages + stats.held_pages + stats.pinned_pages
        assert parts + stats.idle_pages + stats.draining_pages == stats.total_pages
        tree = self.rig.ask(AskCacheTree(limit=100))
        assert isinstance(tree, CacheTree) and not tree.more
        shown_pages = sum(line.pages for line in tree.lines)
        assert shown_pages <= stats.pinned_pages + stats.idle_pages
        assert stats.retired_root_count or shown_pages == stats.pinned_pages + stats.idle_pages
        for by in ("reuse", "size"):
            top = self.rig.ask(AskCacheTop(by=by))
            assert isinstance(top, CacheTop) and top.complete
        assert self.rig.ask(InspectPager()) == self.rig.core.report() == before

    @precondition(lambda self: self.has("held"))
    @rule(pick=picks, ttl_s=st.sampled_from([None, None, 1, 3]))
    def somebody_pins(self, pick: int, ttl_s: int | None) -> None:
        _, view = self.view(pick)
        answer = self.pin(PinPrefix(root=view.root.hex(), tokens=view.tokens, ttl_s=ttl_s))
        if isinstance(answer, PrefixPinned):
            assert 0 < answer.pages <= len(view.tokens) // PAGE_SIZE
        else:
            assert isinstance(answer, Refused), answer
            assert answer.code in {"Gone", "NoCapacity", "Malformed"}, answer
        self.somebody_looks()

    def pin(self, message: PinPrefix) -> Message:
        """Send ``message``; records the idle pages that it pins."""
        self.forget_pins_before_promises()
        idle = self.idle_pages()
        answer = self.rig.ask(message)
        self.taken_by_pins |= idle & pages_of(self.kept_nodes())
        self.pass_on()
        return answer

    @precondition(lambda self: self.rig.core.books.pins)
    @rule(pick=picks)
    def somebody_unpins(self, pick: int) -> None:
        names = sorted(self.rig.core.books.pins)
        answer = self.rig.ask(UnpinPrefix(pin=names[pick % len(names)]))
        assert isinstance(answer, PrefixUnpinned), answer
        self.pass_on()

    @precondition(lambda self: self.rig.core.books.forest.trees)
    @rule(pick=picks, what=st.sampled_from(["root", "root", "idle"]))
    def somebody_invalidates(self, pick: int, what: str) -> None:
        """Sequences admitted later read nothing that was computed under the root before."""
        roots = sorted(self.rig.core.books.forest.trees)
        root = roots[pick % len(roots)]
        if what == "root":
            self.invalidate(InvalidateCache(what="root", name=root.hex()), {root})
        else:
            self.invalidate(InvalidateCache(what="idle"), set())

    @rule(label=st.sampled_from(LABELS))
    def somebody_invalidates_what_is_of(self, label: tuple[Any, str]) -> None:
        """Invalidate a model or a tenant, including roots not known to be another's, such as after
        a restart, and roots that only the disk has."""
        what, name = label
        books = self.rig.core.books
        before = {root: getattr(tree, what) for root, tree in books.forest.trees.items()}
        chosen = {root for root, known in before.items() if known in ("", name)}
        is_always = {root for root, tenants in self.tenants.items() if tenants == {name}}
        assert what == "model" or chosen >= is_always & before.keys()
        if books.disk is not None:
            chosen |= books.disk.roots() - before.keys()
        self.invalidate(InvalidateCache(what=what, name=name), chosen)

    def invalidate(self, message: InvalidateCache, roots: set[bytes]) -> None:
        """Send ``message``, which must retire exactly ``roots``."""
        for root in roots:
            self.memory.ages[root] = self.memory.ages.get(root, 0) + 1
        answer = self.rig.ask(message)
        assert isinstance(answer, CacheInvalidated), answer
        assert {bytes.fromhex(root) for root in answer.roots} == roots
        self.pass_on()
        self.somebody_looks()

    @precondition(lambda self: self.rig.core.is_sweeping)
    @rule()
    def sweeps(self) -> None:
        self.rig.handle(Sweep())
        self.pass_on()

    @invariant()
    def what_is_promised_is_at_hand(self) -> None:
        """Promised pages are free or idle, except those that copies have pinned, those that an
        operator's pin took after the promise, and those that others were admitted to before the
        promise, made in an earlier life, was declared."""
        self.forget_pins_before_promises()
        excused_pages = self.pages_that_pins_took() + self.declared_pages
        assert self.broken_pages() <= excused_pages, "somebody was admitted to what is promised"

    def forget_pins_before_promises(self) -> None:
        """While all promises can be kept, no page pinned or declared so far is missing for one, so
        none of them excuses a shortage from now on."""
        broken_pages = max(self.broken_pages(), 0)
        self.declared_pages = min(self.declared_pages, broken_pages)
        if not broken_pages:
            self.taken_by_pins.clear()

    def broken_pages(self) -> int:
        """How many promised pages are neither free, idle nor taken by copies. Pages that may be
        evicted once all workers have declared count as idle."""
        books = self.rig.core.books
        copies = sum(len(pages) for lease in books.leases.values() for pages in lease.copies)
        promised = sum(lease.promised_pages for lease in books.leases.values())
        return promised - books.pool.free - books.pool.idle - copies

    def pages_that_pins_took(self) -> int:
        """How many pages that were idle until an operator pinned them are still kept by pins alone,
        unused by sequences."""
        books = self.rig.core.books
        kept = self.kept_nodes()
        self.taken_by_pins &= pages_of(kept)
        used = {node for lease in books.leases.values() for node in path_of(lease.anchor)}
        used |= {node for load in books.loads.values() for node in path_of(load.anchor)}
        return len(self.taken_by_pins & pages_of(kept - used))

    def idle_pages(self) -> set[int]:
        """Pages that are cached and not pinned."""
        trees = self.rig.core.books.forest.trees.values()
        return pages_of({node for tree in trees for node in tree.root.below() if not node.pins})

    def kept_nodes(self) -> set[Node]:
        """The edges that operators have pinned."""
        pins = self.rig.core.books.pins.values()
        return {node for pin in pins for node in path_of(pin.anchor)}

    def unpins_all(self) -> None:
        """Remove all pins."""
        self.rig.ask(UnpinPrefix(pin=None))
        self.pass_on()


def path_of(node: Node) -> Iterator[Node]:
    """``node`` and the edges above it."""
    while not node.is_root:
        yield node
        node = node.parent


def pages_of(nodes: Iterable[Node]) -> set[int]:
    """The pages of ``nodes``."""
    return {page for node in nodes for page in table_of(node.pages).tolist()}
