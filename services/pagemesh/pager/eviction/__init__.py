"""Eviction policies, which decide which idle pages go first. One protocol; chosen by name.

policy      the protocol: what the prefix tree tells a policy and asks of it
learned     the default: evicts what is least likely to be used again, as learned from past
            uses with the help of reuse and ghosts
lru, lfu, s3_fifo, priority, cost     the usual policies
registry    policies by name
"""

from pagemesh.pager.eviction.lru import Lru
from pagemesh.pager.eviction.policy import EvictionPolicy
from pagemesh.pager.eviction.registry import POLICIES, make_policy, tenants_budget

__all__ = ["POLICIES", "EvictionPolicy", "Lru", "make_policy", "tenants_budget"]
