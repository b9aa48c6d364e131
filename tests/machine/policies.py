"""The eviction policies of the machines: one per example, the default more often than others."""

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
    """The default policy, which defers work until it is asked for candidates. ``core.check``
    iterates over it after each event, which would end that; iterating over this wrapper does not,
    so that work stays deferred over whole sequences of events."""

    def __init__(self, page_count: int) -> None:
        self._policy = Learned(page_count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def __iter__(self) -> Iterator[Node]:
        heard = self._policy._heard
        last = dict(zip(heard[::3], heard[2::3], strict=True))
        queued = [node for level in self._policy._levels for node in level.nodes()]
        for node in dict.fromkeys([*queued, *last]):
            is_idle = last.get(node, True)  # 0 if the last thing it heard of was a use
            if is_idle and not node.children and not node.pins:
                yield node


class LearningQuickly(PuttingOff):
    """Learns whenever it is asked, instead of each time that some hundred pages have become idle,
    which are more than an example has."""

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
"""The simplest first: Hypothesis shrinks examples towards it."""


class Evicting(Rig):
    """A rig whose pager evicts by the policy given to ``evict_by``, in all its lives. After each
    event, the records of policies and the usage of tenants are checked."""

    _eviction = "lru"
    is_constant = True
    """Whether roots never change their tenant."""

    def new_policy(self, page_count: int) -> EvictionPolicy:
        return EVICTIONS[self._eviction](page_count)

    def evict_by(self, eviction: str) -> None:
        """Set the policy. Must come first, since it replaces the pager by an empty one."""
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
    """The records of each policy agree with the trees of its account."""
    forest, accounts = core.books.forest, core.books.accounts
    trees = [*forest.trees.values(), *forest.retired.values()]
    for account in accounts:
        own = [tree.root for tree in trees if tree.root.account is account]
        account.policy.check(node for root in own for node in root.below())
