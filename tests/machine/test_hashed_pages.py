"""A second index beside the prefix tree: it finds pages by a hash over everything before them.

It is a plain dictionary without edges, splits, pins or order, and is told of the same commits,
forks and evictions. At any time, both must know the same pages and find the same ones for every
prompt.

``PAGEMESH_LONG=1`` runs 10,000 examples of 50 steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.machine.cramped import Cramped, few_constants
from tests.machine.examples import EXAMPLES
from tests.machine.policies import Evicting, evictions
from tests.machine.prompts import ROOTS, picks
from tests.unit.pager.rig import PAGE_SIZE, Worker, fill_of, table_of

from pagemesh.pager.events import Command, PagesDropped
from pagemesh.pager.pages.runs import part
from pagemesh.wire.messages import Ok, SequenceKey
from pagemesh.wire.pager_messages import Committed, Forked, Granted, Queued, Revoke
from pagemesh.wire.tokens import pack

PAGES = 20
OPEN_MAX = 4
GROWTH_TOKENS = 2 * PAGE_SIZE

pages_of_tokens = st.sampled_from([(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0)])
tails = st.lists(st.integers(0, 1), min_size=1, max_size=PAGE_SIZE)
prompts = st.tuples(st.lists(pages_of_tokens, max_size=4), tails).map(
    lambda parts: [token for page in parts[0] for token in page] + parts[1]
)


class HashedPages:
    """Full pages by (hash of the page before, own tokens); the first page's parent is the root."""

    def __init__(self) -> None:
        self.pages: dict[bytes, int] = {}

    def commit(self, root: bytes, tokens: list[int], table: list[int]) -> None:
        """``table`` holds ``tokens``; who came first with a content keeps it."""
        for key, page in zip(_keys(root, tokens), table, strict=False):
            self.pages.setdefault(key, page)

    def drop(self, pages: Iterable[int]) -> None:
        gone = set(pages)
        self.pages = {key: page for key, page in self.pages.items() if page not in gone}

    def match(self, root: bytes, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest known prefix."""
        found = []
        for key in _keys(root, tokens):
            if key not in self.pages:
                break
            found.append(self.pages[key])
        return found


def _keys(root: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    key = root
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        key = _key(key, tuple(tokens[start : start + PAGE_SIZE]))
        yield key


@lru_cache(maxsize=1 << 14)
def _key(before: bytes, page: tuple[int, ...]) -> bytes:
    return hashlib.sha256(before + pack(page)).digest()


class Told(Evicting):
    """A rig that tells the second index which pages are not cached any more."""

    def __init__(self, index: HashedPages) -> None:
        self._index = index
        super().__init__(PAGES)

    def perform(self, command: Command) -> None:
        super().perform(command)
        if isinstance(command, PagesDropped):
            self._index.drop(command.pages)


@dataclass(eq=False)
class Held:
    """A lease, and what its holder has written into it."""

    granted: Granted
    root: bytes
    tokens: list[int]
    table: list[int]


class HashedPagesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = HashedPages()
        self.rig = Told(self.index)
        self.cramped = Cramped(())
        self.number = 0
        self.prompts: list[tuple[bytes, tuple[int, ...]]] = []

    @initialize(eviction=evictions, little=few_constants)
    def start(self, eviction: str, little: Collection[str]) -> None:
        self.cramped = Cramped(little)
        self.rig.evict_by(eviction)
        self.begin(1)

    def begin(self, incarnation: int) -> None:
        self.worker = Worker(self.rig, "w", incarnation)
        self.held: list[Held] = []
        self.waiting: dict[SequenceKey, tuple[bytes, list[int]]] = {}

    @precondition(lambda self: len(self.held) + len(self.waiting) < OPEN_MAX)
    @rule(prompt=prompts, root=st.sampled_from(ROOTS))
    def admits(self, prompt: list[int], root: bytes) -> None:
        self.number += 1
        self.prompts.append((root, tuple(prompt)))
        answer = self.worker.admit(self.number, prompt, len(prompt) + GROWTH_TOKENS, root=root)
        if isinstance(answer, Queued):
            self.waiting[answer.key] = (root, prompt)
        else:
            assert isinstance(answer, Granted), answer
            self.granted(answer, root, prompt)
        self.hear()

    def granted(self, lease: Granted, root: bytes, prompt: list[int]) -> None:
        """A lease starts with what is found of all but the prompt's last token."""
        held = Held(lease, root, list(prompt), table_of(lease))
        found = self.index.match(root, prompt[:-1])
        assert held.table[: len(found)] == found
        assert lease.cached_tokens == len(found) * PAGE_SIZE
        self.held.append(held)

    @precondition(lambda self: self.held)
    @rule(pick=picks, more=tails)
    def draws(self, pick: int, more: list[int]) -> None:
        held = self.pick(pick)
        room = len(held.table) * PAGE_SIZE - len(held.tokens)
        held.tokens += more[:room]

    @precondition(lambda self: self.held)
    @rule(pick=picks, back=st.integers(0, 9))
    def commits(self, pick: int, back: int) -> None:
        held = self.pick(pick)
        filled = max(len(held.tokens) - back, held.granted.cached_tokens)
        self.index.commit(held.root, held.tokens[:filled], held.table)
        answer = self.worker.commit(held.granted, fill_of(held.tokens, filled))
        assert isinstance(answer, Committed), answer
        self.hear()

    @precondition(lambda self: self.held)
    @rule(pick=picks, cache=st.sampled_from([True, True, True, False]))
    def releases(self, pick: int, cache: bool) -> None:
        held = self.pick(pick)
        self.held.remove(held)
        if cache:
            self.index.commit(held.root, held.tokens, held.table)
        answer = self.worker.release(held.granted, held.tokens, cache=cache)
        assert isinstance(answer, Ok), answer
        self.hear()

    @precondition(lambda self: self.held and len(self.held) + len(self.waiting) < OPEN_MAX)
    @rule(pick=picks)
    def forks(self, pick: int) -> None:
        held = self.pick(pick)
        self.number += 1
        choice, slots = held.granted.key.choice + self.number, len(held.tokens) + GROWTH_TOKENS
        answer = self.worker.fork(held.granted, fill_of(held.tokens), [choice], slots)
        if isinstance(answer, Forked):  # else there is no room, and nothing was committed
            self.index.commit(held.root, held.tokens, held.table)
            [child] = answer.children
            self.held.append(Held(child, held.root, list(held.tokens), table_of(child)))
        self.hear()

    @precondition(lambda self: self.rig.epoch < 4)
    @rule()
    def pager_and_worker_start_again(self) -> None:
        self.rig.restart()
        self.begin(self.rig.epoch)

    def teardown(self) -> None:
        self.cramped.over()

    def pick(self, pick: int) -> Held:
        return self.held[pick % len(self.held)]

    def hear(self) -> None:
        """What the pager has said since: leases taken back, and given to those who waited."""
        while revoked := self.rig.taken(Revoke):
            gone = {revoke.lease for revoke in revoked}
            ended = [held for held in self.held if held.granted.lease in gone]
            self.held = [held for held in self.held if held not in ended]
            self.worker.ack(*[held.granted for held in ended])
        for lease in self.rig.taken(Granted):
            self.granted(lease, *self.waiting.pop(lease.key))

    @invariant()
    def both_know_the_same_pages(self) -> None:
        assert sorted(self.index.pages.values()) == sorted(self.rig.cached)

    @invariant()
    def both_find_the_same_for_every_prompt(self) -> None:
        forest = self.rig.core.books.forest
        asked = [*self.prompts, *((held.root, tuple(held.tokens)) for held in self.held)]
        for root, tokens in dict.fromkeys(asked):
            found = []
            if root in forest.trees:
                match = forest.match(
                    forest.trees[root].root, pack(tokens), len(tokens) // PAGE_SIZE
                )
                found = [*forest.table(match.node), *part(match.edge.pages, 0, match.edge_pages)]
            assert found == self.index.match(root, tokens), tokens


HashedPagesMachine.TestCase.settings = EXAMPLES


class TestHashedPages(HashedPagesMachine.TestCase):  # type: ignore[misc,valid-type]
    """The prefix tree finds what an index of hashed pages finds, whatever was done."""
