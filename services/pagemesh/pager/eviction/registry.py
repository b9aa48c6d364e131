"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagemesh.pager.eviction.cost import Cost
from pagemesh.pager.eviction.ghosts import GhostBudget
from pagemesh.pager.eviction.learned import Learned
from pagemesh.pager.eviction.lfu import Lfu
from pagemesh.pager.eviction.lru import Lru
from pagemesh.pager.eviction.policy import EvictionPolicy
from pagemesh.pager.eviction.priority import Priority
from pagemesh.pager.eviction.s3_fifo import S3Fifo
from pagemesh.wire.errors import ConfigError

POLICIES: Mapping[str, Callable[..., EvictionPolicy]] = {
    "learned": Learned,
    "lru": lambda *_: Lru(),
    "lfu": lambda *_: Lfu(),
    "s3-fifo": S3Fifo,
    "priority": lambda *_: Priority(),
    "cost": lambda *_: Cost(),
}
"""Name -> what makes the policy, given the page count of the pool and, if it shares one, its budget
for what it remembers. The first is the default."""


_COMMON_GHOSTS_MIN, _PAGES_PER_GHOST = 65_536, 8


def tenants_budget(page_count: int) -> GhostBudget:
    """For the policies of all tenants of a pool of ``page_count`` pages."""
    return GhostBudget(max(_COMMON_GHOSTS_MIN, page_count // _PAGES_PER_GHOST))


def make_policy(name: str, page_count: int, budget: GhostBudget | None = None) -> EvictionPolicy:
    """A new policy for a pool of ``page_count`` pages; without ``budget``, it remembers what it
    wants. Raises ``ConfigError`` for unknown names."""
    make = POLICIES.get(name)
    if make is None:
        known = ", ".join(POLICIES)
        raise ConfigError(f"no eviction policy is called {name[:40]!r}; there are {known}")
    return make(page_count, budget)
