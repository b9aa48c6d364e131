"""The default policy: evicts first what is least likely to be used again soon, as learned so far.

Idle edges are distinguished by age and by how often they were used before. The last page of a
prompt, its *tail*, is a kind of its own, because the next turn of a chat seldom uses it again: see
``reuse``. Of the edges of one kind, either the oldest or the newest is worth least: the oldest if
uses come soon or not at all, the newest if they come at an age that most edges do not reach, as
when a set of documents larger than the pool is read over and over. So a victim is found by looking
at both ends of a queue for each kind. Where there is nothing to learn, this is LRU.

Evicted edges are remembered for a while (``ghosts``). From these the policy learns how often pages
are used at ages that they cannot reach in a small pool, and how often they were used before.

Ages are counted in pages that have become cached since: what matters is how much else wants room.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from math import inf
from typing import Any, Final

from pagemesh.pager.eviction.ghosts import Ghost, GhostBudget, Ghosts, place_of
from pagemesh.pager.eviction.leaves import LeafQueue, bared, check_queued
from pagemesh.pager.eviction.reuse import ReuseModel
from pagemesh.pager.tree.node import Node

LEVELS: Final = 8
"""Levels of earlier uses: 0, 1, 2, 3, 4 to 7, 8 to 15, 16 to 31, more."""
_USES_MAX: Final = 1 << (LEVELS - 3)
"""Counting stops here."""
_LEVEL_OF: Final = [n if n < 4 else n.bit_length() + 1 for n in range(_USES_MAX + 1)]
_GHOST_POOLS = 4
_GHOST_COUNT_MIN, _PAGES_PER_GHOST = 8_192, 8
_REFRESHES_PER_POOL, _REFRESH_TICKS_MIN = 8, 256
_USED: Final = 0
_LEAF: Final = 1
_INNER: Final = 2
"""What was notified: an edge is in use again, or became idle as a leaf or with edges below it."""
_HEARD_MAX: Final = 1_536
"""Limit of ``_heard``, which has three items per notification."""
_TAILED_PAGES_MAX: Final = 64
"""Longer edges get no tail: one page more or less does not matter there."""
_TAIL_WORTH: Final = 0.5
"""A tail is evicted alone only if it is worth less than this share of the other pages: evicting
whole edges keeps free pages in long runs."""


class _Note:
    """What is remembered of an edge. ``below``: see ``Ghost``. ``use_count``: up to ``_USES_MAX``.
    ``used_at``: 0 while it has never been idle. ``pages``: how many wait in the model, without the
    tail. ``ghost``: of the pages that were cut off its end."""

    __slots__ = ("below", "ghost", "has_tail", "pages", "use_count", "used_at")

    def __init__(self, below: int, use_count: int = 0, used_at: int = 0) -> None:
        self.below = below
        self.use_count = use_count
        self.used_at = used_at
        self.pages = 0
        self.has_tail = False
        self.ghost: Ghost | None = None


class _Level(LeafQueue):
    """Idle edges of one level of earlier uses, in order of age, and so are their tails."""

    __slots__ = ("tailed",)

    def __init__(self) -> None:
        super().__init__()
        self.tailed: Node | None = None
        """The oldest edge that has a tail; those before it have none, and will not get one. It is
        a leaf, and so is never put aside: only edges in use get children."""

    def pass_tail(self, node: Node) -> None:
        """``node``, which is in this queue, loses its tail."""
        _note_of(node).has_tail = False
        if self.tailed is node:
            following = node.newer
            while isinstance(following, Node) and not _note_of(following).has_tail:
                following = following.newer
            self.tailed = following if isinstance(following, Node) else None


class Learned:
    """For a pool of ``page_count`` pages; remembers within ``budget``. Operations are amortised
    O(1), apart from recomputing worths, which happens a few times in the time that it takes to fill
    the pool once."""

    def __init__(self, page_count: int, budget: GhostBudget | None = None) -> None:
        self._now = 0
        self._model = ReuseModel(2 * LEVELS, page_count)
        ghost_count_max = max(_GHOST_COUNT_MIN, page_count // _PAGES_PER_GHOST)
        pages_max = _GHOST_POOLS * page_count
        self._ghosts = Ghosts(pages_max, ghost_count_max, self._forget, budget)
        self._ghost_places = self._ghosts.by_place
        self._levels = [_Level() for _ in range(LEVELS)]
        self._root_count = self._entry_count = 0
        self._refresh_ticks = max(_REFRESH_TICKS_MIN, page_count // _REFRESHES_PER_POOL)
        self._refresh_at = 0
        self._heard: list[Any] = []
        """Pending notifications: the edge, its pages at that time, and what happened. They are
        processed in batches, before they matter, so that a request that evicts nothing does not
        pay for it."""
        # Where requests evict, putting off gains nothing. So once asked for a victim, the policy
        # puts nothing off until it was told to ``tidy`` twice without being asked in between.
        self._puts_off, self._was_asked = True, False

    # Notifications from the tree

    def add(self, node: Node) -> None:
        if not self._puts_off:
            self._rest(node, len(node.pages), not node.children)
            return
        self._heard += (node, len(node.pages), _INNER if node.children else _LEAF)
        if len(self._heard) > _HEARD_MAX:
            self._catch_up()

    def remove(self, node: Node) -> None:
        if self._puts_off:
            self._heard += (node, 0, _USED)
        else:
            self._use(node)

    def forget(self, node: Node) -> None:
        if not node.pins:
            self.remove(node)

    def tidy(self) -> None:
        self._catch_up()
        self._puts_off, self._was_asked = not self._was_asked, False

    def close(self) -> None:
        self._ghosts.close()

    def _catch_up(self) -> None:
        """Process the pending notifications, in order."""
        each = iter(self._heard)
        for node, page_count, what in zip(each, each, each, strict=True):
            if what:
                self._rest(node, page_count, what == _LEAF)
            else:
                self._use(node)
        self._heard.clear()
        if self._model.is_full:
            self._model.count()

    def _rest(self, node: Node, count: int, is_leaf: bool) -> None:
        """``node`` became idle, with ``count`` pages."""
        note: _Note | None = node.note
        if note is None:
            note = self._get_to_know(node) if node.parent.note is None else self._returning(node)
        if not note.used_at:
            self._entry_count += 1
            self._now += count
        elif note.use_count < _USES_MAX:
            note.use_count += 1
        level = _LEVEL_OF[note.use_count]
        note.used_at = now = self._now
        queue = self._levels[level]
        queue.add(node)
        entered = self._model.entered
        if is_leaf and count <= _TAILED_PAGES_MAX:
            note.has_tail = True
            count -= 1
            if queue.tailed is None:
                queue.tailed = node
            entered += (2 * level + 1, now, 1)
        note.pages = count
        entered += (2 * level, now, count)
        if self._model.is_full:
            self._model.count()

    def _use(self, node: Node) -> None:
        """``node``, idle so far, is in use again."""
        note: _Note = node.note
        level, since, now = _LEVEL_OF[note.use_count], note.used_at, self._now
        queue = self._levels[level]
        self._model.ended += (2 * level, since, now, note.pages)
        if note.has_tail:
            queue.pass_tail(node)
            self._model.use(2 * level + 1, since, now, 1)
        note.ghost = None  # pages cut off later will have waited since another time
        queue.remove(node)

    def cut(self, upper: Node, lower: Node) -> None:
        note: _Note | None = lower.note
        if note is None:
            return  # not known yet: both parts are notified when they become idle
        above = _note_of(upper.parent).below
        place = place_of(above, upper.tokens[: _page_bytes(upper)])
        upper.note = _Note(place, note.use_count, note.used_at)
        if not lower.pins:
            used = len(upper.pages)
            note.pages -= used
            self._model.use(2 * _LEVEL_OF[note.use_count], note.used_at, self._now, used)

    def shrink(self, node: Node, keep: int) -> None:
        if self._heard:
            self._catch_up()
        note: _Note = node.note
        level = _LEVEL_OF[note.use_count]
        queue = self._levels[level]
        if note.has_tail:
            self._cut_tail(node, note, level)
            queue.pass_tail(node)
        lost = note.pages - keep
        if lost:
            self._cut_body(node, note, level, keep, lost)
        if not keep:
            queue.remove(node)
            parent = bared(node)
            if parent is not None:
                self._levels[_LEVEL_OF[_note_of(parent).use_count]].recall(parent)

    def victim(self) -> tuple[Node, int]:
        if self._heard:
            self._catch_up()
        self._puts_off, self._was_asked = False, True
        if self._now >= self._refresh_at:
            self._refresh_at = self._now + self._refresh_ticks
            self._model.refresh(self._now, max(1.0, self._now / max(1, self._entry_count)))
        now, model = self._now, self._model
        worth = model.worth
        best, best_since, pages = inf, 0, 0
        found: Node | None = None
        for level, queue in enumerate(self._levels):
            if queue.newer is queue or (oldest := queue.first()) is None:
                continue
            since = _note_of(oldest).used_at
            value = worth[2 * level][model.bucket(now - since)]
            if found is None or value < best or (value == best and since < best_since):
                best, best_since, found, pages = value, since, oldest, len(oldest.pages)
            if (newest := queue.last()) is not None:
                since = _note_of(newest).used_at
                value = worth[2 * level][model.bucket(now - since)]
                if value < best or (value == best and since < best_since):
                    best, best_since, found, pages = value, since, newest, len(newest.pages)
            if (tailed := queue.tailed) is not None:
                since = _note_of(tailed).used_at
                age = model.bucket(now - since)
                value = worth[2 * level + 1][age]
                is_less = value < best or (value == best and since < best_since)
                if is_less and value < _TAIL_WORTH * worth[2 * level][age]:
                    best, best_since, found, pages = value, since, tailed, 1
        if found is None:
            raise LookupError("nothing is idle")
        return found, pages

    def __iter__(self) -> Iterator[Node]:
        self._catch_up()
        return chain.from_iterable(self._levels)

    def check(self, nodes: Iterable[Node]) -> None:
        known = list(nodes)
        first, last = self._first_and_last_heard()
        assert set(known).issuperset(last), "it heard of what is another's, or gone"
        for node, what in last.items():
            assert (what == _USED) == (node.pins > 0), "it heard last of what is over"
        # A node with pending notifications is still in its queue if it was idle before them.
        queued = [one for one in known if first.get(one, _USED if not one.pins else _LEAF) == _USED]
        levels = [_LEVEL_OF[_note_of(node).use_count] for node in queued]
        places = [(node, self._levels[level]) for node, level in zip(queued, levels, strict=True)]
        check_queued(places, self._levels)
        waiting = [0] * (2 * LEVELS)
        for node, level in zip(queued, levels, strict=True):
            note = _note_of(node)
            waiting[2 * level] += note.pages
            waiting[2 * level + 1] += note.has_tail
            if node not in first:
                assert note.pages + note.has_tail == len(node.pages), "it waits for other pages"
                assert not (note.has_tail and node.children), "only a leaf has a tail"
        for queue in self._levels:
            tails = (node for node in queue.nodes() if _note_of(node).has_tail)
            assert queue.tailed is next(tails, None), "a tail is overlooked"
        for ghost in self._ghost_places.values():
            waiting[ghost.kind] += ghost.page_count
        assert waiting == self._model.waiting_pages(), "the model waits for what is not there"
        self._ghosts.check()

    def _first_and_last_heard(self) -> tuple[dict[Node, int], dict[Node, int]]:
        """The first and the last pending notification of each edge."""
        first: dict[Node, int] = {}
        last: dict[Node, int] = {}
        each = iter(self._heard)
        for node, _, what in zip(each, each, each, strict=True):
            assert node not in last or (last[node] == _USED) != (what == _USED), "it heard it twice"
            first.setdefault(node, what)
            last[node] = what
        return first, last

    # Evicted pages and their return

    def _cut_tail(self, node: Node, note: _Note, level: int) -> None:
        place = self._place_at(node, len(node.pages) - 1)
        self._ghosts.put(Ghost(place, note.below, 2 * level + 1, note.use_count, note.used_at, 1))

    def _cut_body(self, node: Node, note: _Note, level: int, keep: int, lost: int) -> None:
        """The lost pages go on waiting in the model for as long as their ghost is remembered."""
        note.pages = keep
        place, ghost = self._place_at(node, keep), note.ghost
        if ghost is not None:
            ghost = self._ghosts.lengthen(ghost, place, lost)
        if ghost is None:
            ghost = Ghost(place, note.below, 2 * level, note.use_count, note.used_at, lost)
            self._ghosts.put(ghost)
        note.ghost = ghost

    def _forget(self, ghost: Ghost) -> None:
        self._model.lapsed += (ghost.kind, ghost.used_at, self._now, ghost.page_count)

    def _get_to_know(self, node: Node) -> _Note:
        """Make a note for ``node`` and for the nodes above it that have none."""
        unknown = [node]
        while not unknown[-1].is_root and unknown[-1].parent.note is None:
            unknown.append(unknown[-1].parent)
        for one in reversed(unknown):
            if one.is_root:
                self._root_count += 1
                one.note = _Note(self._root_count)
            else:
                self._returning(one)
        return _note_of(node)

    def _returning(self, node: Node) -> _Note:
        """Make a note for ``node`` that counts uses from before its content was evicted, if that
        is still remembered."""
        page_bytes = _page_bytes(node)
        place = place_of(_note_of(node.parent).below, node.tokens[:page_bytes])
        node.note = note = _Note(place)
        if place not in self._ghost_places:
            return note
        for ghost in self._ghosts.returned(place, node.tokens, page_bytes):
            self._model.use(ghost.kind, ghost.used_at, self._now, ghost.page_count)
            note.use_count, note.below = min(ghost.use_count + 1, _USES_MAX), ghost.below
        return note

    @staticmethod
    def _place_at(node: Node, index: int) -> int:
        """The place of the page at ``index``; for the first page, the place of the edge."""
        above = _note_of(node if index else node.parent)
        page_bytes = _page_bytes(node)
        return place_of(above.below, node.tokens[index * page_bytes : (index + 1) * page_bytes])


def _page_bytes(node: Node) -> int:
    return len(node.tokens) // len(node.pages)


def _note_of(node: Node) -> _Note:
    """The note of ``node``, which must have one."""
    note: _Note = node.note
    return note
