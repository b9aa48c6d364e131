"""Small values of the limits that make some paths of the pager rare; each example has others.

Constants of the pager's modules are patched for the time of an example if the core is interpreted.
A compiled core has them built in, so only its limits are small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module

import pytest
from hypothesis import strategies as st

import pagemesh.pager
from pagemesh.pager.limits import PagerLimits

Values = Mapping[str, Mapping[str, object]]
"""Values by module of the pager and name in it."""
CONSTANTS: dict[str, Values] = {
    "evicts a page more": {"books": {"_SPARE_SHARE": 12}},
    "evicts three pages more": {"books": {"_SPARE_SHARE": 4}},
    "reclaims bit by bit": {"books": {"_RECLAIMED_EDGES_MAX": 2, "_RECLAIMED_PAGES_MAX": 2}},
    "looks at few seconds": {"tree.lifetime": {"_SECONDS_LOOK_MAX": 1, "_SECONDS_NEAR_MAX": 1}},
    "has edges of one page": {"tree.radix": {"EDGE_PAGES_MAX": 1}},
    "has edges of two pages": {"tree.radix": {"EDGE_PAGES_MAX": 2}},
    "hashes blocks of one page": {
        "tree.departed": {"_BLOCK_PAGES": 1, "_CHAINS_MAX": 1, "_PATHS_MAX": 1},
    },
    "remembers few that left": {
        "tree.departed": {
            "_BLOCK_PAGES": 2, "_MARK_COUNT_MIN": 2, "_MARK_COUNT_MAX": 2, "_RUNS_MAX": 1,
        },
    },
    "has few tenants": {"tree.accounts": {"ACCOUNTS_MAX": 1}},
    "has no tenants": {"tree.accounts": {"ACCOUNTS_MAX": 0}},
    "has short runs": {
        "pages.free_pages": {
            "RUN_PAGES_MIN": 2, "_LOOK_RUNS_MAX": 1, "_TIDY_PAGES_MAX": 2, "_TIDY_RUNS_MAX": 1,
        },
        "pages.pool": {"_RAMP_COUNT": 2},
    },
    "has one root": {
        "retention.root_lines": {"ROOT_COUNT_MAX": 1}, "audit": {"ROOT_COUNT_MAX": 1},
    },
    "has two roots": {
        "retention.root_lines": {"ROOT_COUNT_MAX": 2},
        "retention.roots": {"_QUICK_EDGES": 1, "_LARGE_EDGES": 2, "_TREES_LOOK_MAX": 2},
        "audit": {"ROOT_COUNT_MAX": 2},
    },
    "sweeps bit by bit": {"retention.sweeps": {"_EDGES_MAX": 1, "_PAGES_MAX": 1}},
    "compares with one that fills": {"leases.in_flight": {"_FILLING_MAX": 1}},
    "lets few go before": {
        "leases.overtaking": {"LOOKED_AT_MAX": 2, "PASSED_MAX": 1, "SHARE_MIN": 0.0},
    },
    "is soon told to declare": {"leases.sessions": {"_MISMATCHES_MAX": 1}},
    "puts off little": {
        "eviction.learned": {"_HEARD_MAX": 3, "_TAILED_PAGES_MAX": 1},
        "eviction.leaves": {"NEWEST_MAX": 1},
        "eviction.reuse": {"_NUMBERS_MAX": 6, "_OUTCOMES_MAX": 2.0},
        "eviction.cost": {"_STALE_MIN": 0},
    },
    "has few ghosts": {
        "eviction.learned": {"_GHOST_COUNT_MIN": 1, "_PAGES_PER_GHOST": 12, "_GHOST_POOLS": 1},
        "eviction.s3_fifo": {"_GHOST_COUNT_MIN": 1, "_PAGES_PER_GHOST": 12, "USES_MAX": 1},
        "eviction.ghosts": {"_PASSED_MIN": 0},
        "eviction.lfu": {"USES_MAX": 1},
    },
}  # fmt: skip
LIMITS_OF: dict[str, dict[str, int]] = {
    "has room for one waiter": {"waiter_count_max": 1},
    "has room for two waiters": {"waiter_count_max": 2},
    "has three leases": {"lease_count_max": 3},
    "has one ticket": {"ticket_count_max": 1},
    "has four sessions": {"session_count_max": 4},
    "has one pin": {"pin_count_max": 1},
    "remembers one that ended": {"ended_count_max": 1},
}
_OF_ROOTS = {"has one root", "has two roots"}
_MOST = frozenset(CONSTANTS.keys() - _OF_ROOTS - {"has few tenants", "has no tenants"})
"""All constants that leave enough to be done; of two values for one, the later."""
few_constants = st.one_of(
    st.sampled_from([frozenset(), _MOST]),
    st.frozensets(st.sampled_from(sorted(CONSTANTS.keys() - _OF_ROOTS)), max_size=6),
)
"""The constants that are small in an example, without those that limit the number of roots."""
cramps = st.tuples(
    few_constants, st.frozensets(st.sampled_from([*LIMITS_OF, *sorted(_OF_ROOTS)]), max_size=3)
).map(lambda parts: parts[0] | parts[1])
"""The same, and low limits."""


class Cramped:
    """Makes the values of ``names`` small until ``over`` is called."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(names)
        self._patch = pytest.MonkeyPatch()
        if pagemesh.pager.IS_COMPILED:
            return
        for name in self._names:
            for module, values in CONSTANTS.get(name, {}).items():
                there = import_module(f"pagemesh.pager.{module}")
                for what, value in values.items():
                    assert hasattr(there, what)
                    self._patch.setattr(there, what, value)

    def limits(self, usual: PagerLimits) -> PagerLimits:
        """``usual``, with the limits of ``names`` lowered."""
        for name in self._names:
            usual = replace(usual, **LIMITS_OF.get(name, {}))
        return usual

    def over(self) -> None:
        """Restore all values."""
        self._patch.undo()
