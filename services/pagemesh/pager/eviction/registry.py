"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagemesh.pager.eviction.cost import Cost
from pagemesh.pager.eviction.learned import Learned
from pagemesh.pager.eviction.lfu import Lfu
from pagemesh.pager.eviction.lru import Lru
from pagemesh.pager.eviction.policy import EvictionPolicy
from pagemesh.pager.eviction.priority import Priority
from pagemesh.pager.eviction.s3_fifo import S3Fifo
from pagemesh.wire.errors import ConfigError

POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = {
    "learned": Learned,
    "lru": lambda _page_count: Lru(),
    "lfu": lambda _page_count: Lfu(),
    "s3-fifo": S3Fifo,
    "priority": lambda _page_count: Priority(),
    "cost": lambda _page_count: Cost(),
}
"""Name -> what makes the policy, given the page count of the pool. The first is the default."""


def make_policy(name: str, page_count: int) -> EvictionPolicy:
    """A new policy for a pool of ``page_count`` pages. Raises ``ConfigError`` for unknown names."""
    make = POLICIES.get(name)
    if make is None:
        known = ", ".join(POLICIES)
        raise ConfigError(f"no eviction policy is called {name[:40]!r}; there are {known}")
    return make(page_count)
