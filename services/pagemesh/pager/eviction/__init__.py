"""Which idle pages go first: policies behind one protocol, chosen by name.

policy      what a policy is told and asked by the prefix tree
learned     the default: what is least likely to be used again, as seen so far;
            reuse and ghosts are what it learns with
lru, lfu, s3_fifo, priority, cost     what is usual
registry    policies by name
"""

from pagemesh.pager.eviction.lru import Lru
from pagemesh.pager.eviction.policy import EvictionPolicy
from pagemesh.pager.eviction.registry import POLICIES, make_policy

__all__ = ["POLICIES", "EvictionPolicy", "Lru", "make_policy"]
