"""Which policies the machines evict with: one an example, the default more often than others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
from hypothesis import strategies as st
from tests.machine.tenancy import Tenancy
from tests.unit.pager.rig import Rig

from pagemesh.pager.events import Command, Event
from pagemesh.pager.eviction import POLICIES, EvictionPolicy
from pagemesh.pager.eviction.learned import Learned
from pagemesh.pager.state import PagerCore
from pagemesh.pager.tree.node import Node


class PuttingOff:
    """The default. ``core.check`` looks at it after each event, and then it works out what it put
    off; looked at by way of this it does not, so that whole sequences of events are put off."""

    def __init__(self, page_count: int) -> None:
        self._policy = Learned(page_count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def __iter__(self) -> Iterator[Node]:
        heard = self._policy._heard
        last = dict(zip(heard[::3], heard[2::3], strict=True))
        queued = [node for level in self._policy._levels for node in level.nodes()]
        for node in dict.fromkeys([*queued, *last]):
            is_idle = last.get(node, True)  # what it heard of a use is 0
            if is_idle and not node.children and not node.pins:
                yield node


class LearningQuickly(PuttingOff):
    """It looks at what it saw whenever it is asked, rather than each time some hundred pages have
    become idle, which are more than an example has."""

    def __init__(self, page_count: int) -> None:
        super().__init__(page_count)
        self._policy._refresh_ticks = 1


EVICTIONS: dict[str, Callable[[int], EvictionPolicy]] = {
    **POLICIES,
    "learned": lambda page_count: cast(EvictionPolicy, PuttingOff(page_count)),
    "learned-quickly": lambda page_count: cast(EvictionPolicy, LearningQuickly(page_count)),
}
_OFTEN = ["learned", "learned-quickly"] * 2
evictions = st.sampled_from(["lru", "s3-fifo", *_OFTEN, "lfu", "priority", "cost"])
"""The plainest first: examples are made shorter with it if they can."""


class Evicting(Rig):
    """A rig whose pager evicts as ``evict_by`` said, and in all its lives. After each event what
    policies noted is looked at, and what tenants use."""

    _eviction = "lru"
    is_constant = True
    """Whose the roots are does not change."""

    def new_policy(self, page_count: int) -> EvictionPolicy:
        return EVICTIONS[self._eviction](page_count)

    def evict_by(self, eviction: str) -> None:
        """Before anything else is done: the pager that is there knows nothing."""
        self._eviction = eviction
        self.words = np.zeros(self.limits.lease_count_max, np.uint64)
        self.core = self._new_core()

    def _new_core(self) -> PagerCore:
        self.tenancy = Tenancy()
        return super()._new_core()

    def handle(self, event: Event) -> list[Command]:
        commands = super().handle(event)
        check_policies(self.core)
        self.tenancy.check(self.core.books, is_constant=self.is_constant)
        return commands


def check_policies(core: PagerCore) -> None:
    """Each policy has noted what is so of the trees of its account."""
    forest, accounts = core.books.forest, core.books.accounts
    trees = [*forest.trees.values(), *forest.retired.values()]
    for account in accounts:
        own = [tree.root for tree in trees if tree.root.account is account]
        account.policy.check(node for root in own for node in root.below())
