"""Recounts pages and pins from their owners, to find what the books have lost.

    page   held or draining: owned by one lease or one load, or left by an earlier life
           committed and in use: in one pinned edge
    pins   of an edge: one for each lease, load and operator's pin that ends there, and for each
           pinned edge right below it

Any difference is a bug that would otherwise show only much later: as pages that nobody can get any
more, or as pages that are given away while somebody reads them. A recount takes a step for each
lease and for each edge in use, and none for idle edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagemesh.pager.books import Books
from pagemesh.pager.leases.lease import Lease
from pagemesh.pager.leases.states import LeaseState
from pagemesh.pager.pages.runs import Pages, Run, table_of, where
from pagemesh.pager.tree.radix import Node
from pagemesh.wire.pager_reports import LedgerFault
from pagemesh.wire.pool_format import HeaderState

FAULTS_MAX = 32
_PAGES_NAMED_MAX = 8
_EDGES_MAX = 50_000
"""Edges in use that one turn of the pager has time to count."""
_ROOT_DIGITS = 12
_HELD, _DRAINING = int(HeaderState.HELD), int(HeaderState.DRAINING)
_COMMITTED, _FREE = int(HeaderState.COMMITTED), int(HeaderState.FREE)
_NAMES = {_FREE: "free", _HELD: "held", _COMMITTED: "cached", _DRAINING: "draining"}

Owner = Lease | Node | None
"""None: pages that are being read from disk, or were left by an earlier life of the pager."""


@dataclass(slots=True)
class Recount:
    """``leased_pages``: held by leases. ``are_pins_counted``: False for too many edges in use."""

    faults: list[LedgerFault] = field(default_factory=list)
    leased_pages: int = 0
    are_pins_counted: bool = True


@dataclass(slots=True)
class _Pins:
    """By edge. ``anchored``: how many leases, loads and operators' pins end there; ``wanted``: how
    many pins it should have, 1 for each of them and for each needed edge below it."""

    anchored: dict[Node, int]
    wanted: dict[Node, int]


def owner_of(books: Books, lease: Lease) -> str:
    """The owner of ``lease``, for people to read; ``?`` while its incarnation is not known."""
    session = books.sessions.get(lease.incarnation)
    worker = session.worker if session is not None and session.worker else "?"
    return f"ticket of {worker}" if lease.ticket else worker


def recount(books: Books) -> Recount:
    """Count anew. Lists at most ``FAULTS_MAX`` things that do not add up."""
    found = Recount()
    found.leased_pages = sum(len(lease.held_pages) for lease in books.leases.values())
    found.faults += _counters(books)
    pins = _pins(books)
    if pins is None:
        found.are_pins_counted = False
    else:
        found.faults += _pin_faults(books, pins)
    edges = pins.wanted if pins is not None else {}
    found.faults += _page_faults(books, edges)
    del found.faults[FAULTS_MAX:]
    return found


# Pages


def _counters(books: Books) -> Iterator[LedgerFault]:
    """Compare the running counters with the states of pages."""
    pool = books.pool
    counts = np.bincount(pool.states, minlength=len(HeaderState)).tolist()
    said = {
        _FREE: pool.free, _HELD: pool.held, _DRAINING: pool.draining,
        _COMMITTED: pool.pinned + pool.idle,
    }  # fmt: skip
    for state, count in said.items():
        if counts[state] != count:
            what = f"pages counted as {_NAMES[state]}: {count}, found: {counts[state]}"
            yield LedgerFault(what=what)


def _parts(books: Books, edges: Iterable[Node]) -> Iterator[tuple[Owner, Pages, int]]:
    """Owners, their pages, and the state that these should have."""
    for lease in books.leases.values():
        state = _DRAINING if lease.life.state is LeaseState.REVOKED else _HELD
        for pages in lease.copies:
            yield lease, pages, state
        for pages in lease.writable:
            yield lease, pages, state
    for load in books.loads.values():
        yield None, load.pages, _HELD
    for session in books.sessions.values():
        yield None, session.claimed, _DRAINING
        for left in session.letting_go.values():
            yield None, left, _DRAINING
    yield None, books.limbo, _DRAINING
    for node in edges:
        if node.pins:
            yield node, node.pages, _COMMITTED


def _page_faults(books: Books, edges: Iterable[Node]) -> Iterator[LedgerFault]:
    edges = list(edges)
    states = books.pool.states
    marks = bytearray(books.pool.total)  # faster than numpy for runs, as most parts are
    due = np.frombuffer(marks, np.uint8)  # the state that a page's owner counts on
    twice = np.zeros(books.pool.total, bool)
    for _, pages, state in _parts(books, edges):
        if isinstance(pages, Run) and marks.count(0, pages.start, pages.stop) == len(pages):
            marks[pages.start : pages.stop] = bytes([state]) * len(pages)
            continue
        at = where(pages)
        twice[table_of(pages)[due[at] != 0]] = True
        due[at] = state
    wrong = (due != 0) & (due != states)
    if twice.any() or wrong.any():
        for owner, pages, state in _parts(books, edges):
            table = table_of(pages)
            for mask, what in (
                (twice, "pages that somebody else has too"),
                (wrong, f"pages that should be {_NAMES[state]} are not"),
            ):
                if mask[table].any():
                    yield _fault(books, what, table[mask[table]], owner)
    for state in (_HELD, _DRAINING):
        lost = np.flatnonzero((states == state) & (due == 0))
        if len(lost):
            yield _fault(books, f"pages are {_NAMES[state]}, and nobody's", lost, None)


# Pins


def _pins(books: Books) -> _Pins | None:
    """Count the pins needed, as the tree does when one is added; None for too many edges."""
    pins = _Pins({}, {})
    anchored, wanted = pins.anchored, pins.wanted
    for anchor in books.anchors():
        anchored[anchor] = anchored.get(anchor, 0) + 1
        node = anchor
        while True:
            count = wanted.get(node, 0)
            wanted[node] = count + 1
            if count or node.is_root:
                break
            node = node.parent
        if len(wanted) > _EDGES_MAX:
            return None
    return pins


def _pin_faults(books: Books, pins: _Pins) -> Iterator[LedgerFault]:
    """Edges with too many pins, or too few. A pinned edge that nobody needs is found from where its
    path joins a needed edge, or else the root: that has a pin too many."""
    wanted, forest = pins.wanted, books.forest
    roots = [tree.root for tree in (*forest.trees.values(), *forest.retired.values())]
    doubtful = [node for node in roots if node.pins != wanted.get(node, 0)]
    doubtful += [node for node, count in wanted.items() if node.pins != count and not node.is_root]
    astray: set[Node] = set()
    stack = doubtful
    while stack:
        node = stack.pop()
        pinned = [child for child in node.children.values() if child.pins]
        lost = [child for child in pinned if child not in wanted and child not in astray]
        astray.update(lost)
        stack += lost
        users = pins.anchored.get(node, 0) + len(pinned)
        if node.pins != users:
            which = "too many" if node.pins > users else "too few"
            what = f"a prefix has {which} pins: {node.pins} for {users} who need it"
            yield _fault(books, what, table_of(node.pages), node)
    pages = sum(len(node.pages) for node in (*wanted, *astray) if node.pins)
    if pages != books.pool.pinned:
        what = f"pages counted as pinned: {books.pool.pinned}, found: {pages}"
        yield LedgerFault(what=what)


# Naming


def _fault(books: Books, what: str, pages: NDArray[np.integer], owner: Owner) -> LedgerFault:
    named = [int(page) for page in pages[:_PAGES_NAMED_MAX]]
    if isinstance(owner, Lease):
        return LedgerFault(
            what=what, page_count=len(pages), pages=named, lease=owner.id, key=owner.key,
            owner=owner_of(books, owner), trace=owner.trace,
        )  # fmt: skip
    root = "" if owner is None else _place(books, owner)
    return LedgerFault(what=what, page_count=len(pages), pages=named, root=root)


def _place(books: Books, node: Node) -> str:
    tree = books.forest.tree_of(node)
    whose = [f"model {tree.model}"] if tree.model else []
    whose += [f"tenant {tree.tenant}"] if tree.tenant else []
    named = ", ".join([f"root {tree.digest.hex()[:_ROOT_DIGITS]}", *whose])
    return f"{named}, up to page {node.depth}"
